"""Handoffs between engines with one pipeline stage and with two give the same answers as one engine.

WHOLE_TABLE=1 runs all models with 20 prompts each.
"""

import functools
import os

import pytest

from harness.architectures import language
from harness.architectures.registry import ARCHITECTURES
from harness.engines import BLOCK_SIZE, EngineProcess, Options, generate
from tests.handoff.engines import generate_all, hand_over, held, pull_early

WHOLE = "WHOLE_TABLE" in os.environ
COUNT, WRITTEN, STEP = 20 if WHOLE else 6, 12, 128
MODELS = {  # name -> architecture, maximum tokens of a prompt, layers of each stage
    "latent": ("mtp-deepseek-v3", 110, "2,1"),
    "a stage without a group": ("ngram-gemma3", 300, "1,3"),
}
if WHOLE:
    MODELS |= {
        "one group": ("eagle", 300, "3,3"),
        "two groups": ("ngram-gemma3", 300, "2,2"),
        "states": ("mtp-qwen3-next", 0, "2,2"),
    }
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
MLA = {"attention_backend": "CPU_MLA", "block_size": 16}

pytestmark = pytest.mark.timeout(300)


def divide(layers):
    os.environ["VLLM_PP_LAYER_PARTITION"] = layers


def options(name, worker_id, layers=""):
    """An engine without the architecture's drafter. layers: the number of each stage's layers."""
    model = ARCHITECTURES[name]
    own = {"dtype": model.dtype, "enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 26}
    own |= model.engine | (MLA if "deepseek" in name else {}) | (STAGES if layers else {})
    return Options(
        model.target(model.checkpoint()),
        worker_id,
        "0|1" if layers else "0",
        engine=own,
        prepare=functools.partial(divide, layers) if layers else None,
    )


def compatibility(engine):
    side = engine.connector.scheduler_side
    return side.compatibility_hash, dict(side.facts)


@pytest.mark.parametrize(("name", "most", "layers"), list(MODELS.values()), ids=list(MODELS))
def test_stages_hand_over_to_any_stages(name, most, layers):
    """most: tokens of the longest prompt; 0: the architecture's own prompts, which are clear in its dtype."""
    if most:
        drawn = [language.prompt(n, most)[-(20 + (most - 20) * n // COUNT) :] for n in range(COUNT)]
    else:
        drawn = ARCHITECTURES[name].prompts(COUNT)
    with EngineProcess(options(name, "one")) as one, EngineProcess(options(name, "two", layers)) as two:
        assert one.call(compatibility) == two.call(compatibility)
        expected = one.call(generate_all, drawn, WRITTEN)
        for source, target in ((two, one), (one, two), (two, two)):
            answers, manifests = hand_over(source, target, drawn, expected)
            assert all(answer.loaded.blocks for answer in answers)
            assert [len(shard.layers) for shard in manifests[0].shards] == (
                [int(each) for each in layers.split(",")] if source is two else [0]
            )


def test_stages_are_pulled_early():
    """The first step's records of both stages, and the second step's of the first stage, which is ahead."""
    prompt = language.prompt(1, 600)[-300:]
    with EngineProcess(options("eagle", "one")) as one, EngineProcess(options("eagle", "two", "3,3")) as two:
        expected = one.call(generate, "alone", prompt, WRITTEN)
        early, there, first, last = pull_early(two, one, "early", prompt, WRITTEN)
        block = sum(shard.record_bytes for shard in early.shards)
        assert STEP // BLOCK_SIZE * block <= there < len(prompt) // BLOCK_SIZE * block
        assert first.tokens + last.tokens == expected
        assert two.call(held) == (0, 0)
