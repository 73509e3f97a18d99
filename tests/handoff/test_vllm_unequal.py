"""Handoffs between engines with one rank and with two give the same answers as one engine."""

import random
from contextlib import contextmanager
from dataclasses import replace

import pytest

from harness.architectures.experts import deepseek_v3
from harness.engines import BLOCK_SIZE, EngineProcess, Options, generate
from tests.handoff import checkpoints
from tests.handoff.engines import generate_all, hand_over, held, pull_early

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


@contextmanager
def both(options):
    """An engine with one rank, which also answers alone, and one with two."""
    two = replace(options, worker_id="two", cores="0|1", engine=options.engine | RANKS)
    with EngineProcess(options) as one, EngineProcess(two) as other:
        yield one, other


def hand_over_both_ways(one, two, prompts, transport):
    expected = one.call(generate_all, prompts, WRITTEN)
    for source, target in ((two, one), (one, two)):
        answers, _ = hand_over(source, target, prompts, expected, stock=True)
        assert {answer.loaded.transport for answer in answers if answer.loaded} == {transport}


def test_heads_of_a_model_and_its_drafter_are_joined_and_cut(tmp_path, model):
    draw = random.Random(1)
    prompts = [draw.choices(range(2, checkpoints.VOCAB), k=length) for length in range(33, 333, 45)]
    with both(Options(model, "one", drafter=checkpoints.eagle(tmp_path / "eagle"), engine=OWN)) as (one, two):
        hand_over_both_ways(one, two, prompts, "shm")
        # early: the first step's records of both shards, before the second step
        expected = one.call(generate, "alone", prompts[-1], WRITTEN)
        early, there, first, last = pull_early(two, one, "early", prompts[-1], WRITTEN)
        assert there == STEP // BLOCK_SIZE * sum(shard.record_bytes for shard in early.shards)
        assert first.tokens + last.tokens == expected
        assert two.call(held) == (0, 0)


def test_a_latent_that_all_ranks_have_is_pulled_once(tmp_path):
    model = tmp_path / "deepseek"
    deepseek_v3(model)
    draw = random.Random(1)
    prompts = [draw.choices(range(2, 300), k=length) for length in range(33, 113, 12)]
    with both(Options(model, "one", transports=("tcp",), engine=OWN | MLA)) as (one, two):
        hand_over_both_ways(one, two, prompts, "tcp")
