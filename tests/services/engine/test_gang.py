"""Engines of a gang answer as one engine does, wherever their requests come in.

WHOLE_TABLE=1 also runs gangs whose engines have two ranks each.
"""

import os
import time

import pytest

from harness.architectures.experts import deepseek_v3, glm4_moe
from harness.architectures.language import prompt
from harness.engines import BLOCK_SIZE
from harness.gangs import Gang, Options
from harness.support import eventually

WRITTEN = 12
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
CASES = {"glm4": (glm4_moe, {}), "deepseek-mtp": (deepseek_v3, MTP)}
if "WHOLE_TABLE" in os.environ:
    wide = {"tensor_parallel_size": 2}
    CASES |= {"glm4-mtp-wide": (glm4_moe, MTP | wide), "deepseek-mtp-wide": (deepseek_v3, MTP | wide)}

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("write", "engine"), list(CASES.values()), ids=list(CASES))
def test_they_answer_like_one_engine_and_learn_of_its_end(tmp_path, write, engine):
    model = tmp_path / "model"
    write(model)
    prompts = {f"r{number}": prompt(number) for number in range(4)}
    alone = {key: value for key, value in engine.items() if key != "tensor_parallel_size"}
    with Gang(Options(model, size=1, engine=alone)) as plain:
        for name, tokens in prompts.items():
            plain.add(0, name, tokens, WRITTEN)
        expected = plain.answers(prompts)
    with Gang(Options(model, engine=engine)) as gang:
        first = gang.still()
        for rank in (1, 0):
            for name, tokens in prompts.items():
                gang.add(rank, f"alone-{rank}-{name}", tokens, WRITTEN)
            found = gang.answers([f"alone-{rank}-{name}" for name in prompts])
            assert list(found.values()) == list(expected.values())
        looks = gang.still()
        assert looks[0].wave > first[0].wave
        assert all(one.dummies for one in looks)
        before = sum(one.dummies for one in looks)
        time.sleep(0.3)  # a gang without work computes nothing
        assert sum(one.dummies for one in gang.looks()) == before
        for turn in range(4):  # both ring at about the same time
            names = [f"both-{turn}-{rank}" for rank in (0, 1)]
            for rank, name in enumerate(names):
                gang.add(rank, name, prompts[f"r{rank}"], 3)
            found = gang.answers(names)
            assert [found[name] for name in names] == [expected[f"r{rank}"][:3] for rank in (0, 1)]
            gang.still()
        for number, (name, tokens) in enumerate(prompts.items()):
            gang.add(number % 2, f"mixed-{name}", tokens, WRITTEN)
        found = gang.answers([f"mixed-{name}" for name in prompts])
        assert {name: found[f"mixed-{name}"] for name in prompts} == expected
        if engine:
            assert gang.stop() == [True, True]
            return
        gang.still()
        gang.processes[1].kill()
        eventually(lambda: gang.call(0, "look").lost, 5.0, "rank 0 learns of it before 30 s of silence")


def test_drafts_that_come_with_a_prompt_are_verified_at_once(tmp_path):
    """All but the prompt's last token is in the prefix cache, as after a handoff."""
    model = tmp_path / "model"
    glm4_moe(model)
    tokens = (prompt(1) * 3)[: 2 * BLOCK_SIZE + 1]
    engine = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    with Gang(Options(model, engine=engine)) as gang:
        gang.add(0, "first", tokens, 3)
        expected = gang.answers(["first"])["first"]
        before = gang.still()[0].steps
        gang.add(0, "again", tokens, 3, drafts=expected[:2])
        assert gang.answers(["again"])["again"] == expected
        assert gang.still()[0].steps == before + 1
