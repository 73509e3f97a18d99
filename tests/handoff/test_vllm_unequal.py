"""Handoffs between engines with one rank and with two give the same answers as one engine."""

import random
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from baton.handoff.params import load_params, save_params
from harness.architectures.experts import deepseek_v3
from harness.engines import (
    BLOCK_SIZE,
    EngineProcess,
    Options,
    begin_decode,
    begin_prefill,
    end_decode,
    end_prefill,
    pulled,
)
from tests.handoff import checkpoints
from tests.handoff.engines import held, manifest_of

WRITTEN = 12
STEP = 128  # tokens
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# float32, because two ranks add in another order, and no answer may depend on the last bit
OWN = {"dtype": "float32", "enable_prefix_caching": False}
MLA = {
    "attention_backend": "CPU_MLA",
    "block_size": 16,
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},  # the CPU's is wrong for this model
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"},
}

pytestmark = pytest.mark.timeout(300)


@dataclass
class Pair:
    """An engine with one rank, which also answers alone, and one with two."""

    one: EngineProcess
    two: EngineProcess


@contextmanager
def pair(options):
    two = Options(**vars(options) | {"worker_id": "two", "cores": "0|1", "engine": options.engine | RANKS})
    with EngineProcess(options) as one, EngineProcess(two) as other:
        yield Pair(one, other)


def read_all(engine, prompts):
    answers = {name: engine.add(name, prompt, 1, save_params(1)) for name, prompt in prompts.items()}
    engine.run()
    return {name: manifest_of(answer) for name, answer in answers.items()}


def write_all(engine, prompts, manifests):
    def params(name):
        return load_params(1, manifests[name].num_tokens, manifests[name]) if manifests is not None else None

    for name, prompt in prompts.items():
        engine.add(name, prompt, WRITTEN, params(name))
    engine.run()
    return {name: engine.answers[name] for name in prompts}


def hand_over(made, draw):
    """Prefill on each and decode on the other; check and return the answers."""
    expected = made.one.call(write_all, {f"alone-{n}": prompt for n, prompt in enumerate(draw)}, None)
    found = []
    for source, puller, name in ((made.two, made.one, "2-1"), (made.one, made.two, "1-2")):
        prompts = {f"{name}-{n}": prompt for n, prompt in enumerate(draw)}
        answers = puller.call(write_all, prompts, source.call(read_all, prompts))
        assert [
            str(one.loaded.problem) for one in answers.values() if one.loaded and one.loaded.problem
        ] == []
        equal = sum(
            one.tokens == right.tokens for one, right in zip(answers.values(), expected.values(), strict=True)
        )
        assert f"{name}: {equal}" == f"{name}: {len(draw)}"
        assert source.call(held) == (0, 0)
        found += answers.values()
    return found


def test_heads_of_a_model_and_its_drafter_are_joined_and_cut(tmp_path):
    model, drafter = checkpoints.qwen2(tmp_path / "qwen2"), checkpoints.eagle(tmp_path / "eagle")
    draw = random.Random(1)
    prompts = [draw.choices(range(2, checkpoints.VOCAB), k=length) for length in range(33, 333, 45)]
    with pair(Options(model, "one", drafter=drafter, engine=OWN)) as made:
        answers = hand_over(made, prompts)
        assert {one.loaded.transport for one in answers if one.loaded} == {"shm"}
        # early: the first step's records of both shards, before the second step
        prompt, name = prompts[-1], "early"
        (expected,) = made.one.call(write_all, {"alone": prompt}, None).values()
        early = made.two.call(begin_prefill, name, prompt)
        assert early is not None
        there = made.one.call(begin_decode, name, prompt, WRITTEN, early)
        assert there == STEP // BLOCK_SIZE * sum(shard.record_bytes for shard in early.shards)
        first = made.two.call(end_prefill, name)
        made.one.call(pulled, name, 1)
        last = made.one.call(end_decode, name, first.tokens, manifest_of(first))
        assert first.tokens + last.tokens == expected.tokens
        assert made.two.call(held) == (0, 0)


def test_a_latent_that_all_ranks_have_is_pulled_once(tmp_path):
    model = tmp_path / "deepseek"
    deepseek_v3(model)
    draw = random.Random(1)
    prompts = [draw.choices(range(2, 300), k=length) for length in range(33, 113, 12)]
    options = Options(model, "one", transports=("tcp",), engine=OWN | MLA)
    with pair(options) as made:
        answers = hand_over(made, prompts)
        assert {one.loaded.transport for one in answers if one.loaded} == {"tcp"}
