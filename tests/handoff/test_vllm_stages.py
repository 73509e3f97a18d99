"""Handoffs between engines with one pipeline stage and with two give the same answers as one engine.

WHOLE_TABLE=1 runs all models with 20 prompts each.
"""

import functools
import os

import pytest

from baton.handoff.params import load_params, save_params
from harness.architectures import language
from harness.architectures.registry import ARCHITECTURES
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
from tests.handoff.engines import held, manifest_of

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


def read_all(engine, prompts):
    answers = {name: engine.add(name, prompt, 1, save_params(1)) for name, prompt in prompts.items()}
    engine.run()
    return {name: (answer.tokens[0], manifest_of(answer)) for name, answer in answers.items()}


def write_all(engine, prompts, saved):
    """Continue after the saved first tokens, or answer alone."""
    for name, prompt in prompts.items():
        if name in saved:
            first, manifest = saved[name]
            params = load_params(1, manifest.num_tokens, manifest)
            engine.add(name, prompt, WRITTEN, params, written=[first])
        else:
            engine.add(name, prompt, WRITTEN)
    engine.run()
    return {name: engine.answers[name] for name in prompts}


@pytest.mark.parametrize(("name", "most", "layers"), list(MODELS.values()), ids=list(MODELS))
def test_stages_hand_over_to_any_stages(name, most, layers):
    """most: tokens of the longest prompt; 0: the architecture's own prompts, which are clear in its dtype."""
    if most:
        drawn = [language.prompt(n, most)[-(20 + (most - 20) * n // COUNT) :] for n in range(COUNT)]
    else:
        drawn = ARCHITECTURES[name].prompts(COUNT)
    prompts = {str(n): one for n, one in enumerate(drawn)}
    one = EngineProcess(options(name, "one"))
    two = EngineProcess(options(name, "two", layers))
    with one, two:
        assert one.call(compatibility) == two.call(compatibility)
        expected = one.call(write_all, prompts, {})
        for source, target, way in ((two, one, "2-1"), (one, two, "1-2"), (two, two, "2-2")):
            named = {f"{way}-{key}": prompt for key, prompt in prompts.items()}
            saved = source.call(read_all, named)
            answers = target.call(write_all, named, saved)
            loads = [answer.loaded for answer in answers.values() if answer.loaded is not None]
            assert [str(load.problem) for load in loads if load.problem is not None] == []
            assert all(load.blocks for load in loads)
            assert len(loads) == COUNT
            equal = [
                key
                for key in prompts
                if [saved[f"{way}-{key}"][0], *answers[f"{way}-{key}"].tokens] == expected[key].tokens
            ]
            assert f"{way}: {len(equal)}" == f"{way}: {COUNT}"
            assert source.call(held) == (0, 0)
            shards = next(iter(saved.values()))[1].shards
            assert [len(shard.layers) for shard in shards] == (
                [int(each) for each in layers.split(",")] if source is two else [0]
            )


def test_stages_are_pulled_early():
    """The first step's records of both stages, and the second step's of the first stage, which is ahead."""
    prompt, name = language.prompt(1, 600)[-300:], "early"
    with EngineProcess(options("eagle", "one")) as one, EngineProcess(options("eagle", "two", "3,3")) as two:
        expected = one.call(write_all, {"alone": prompt}, {})["alone"].tokens
        early = two.call(begin_prefill, name, prompt)
        assert early is not None
        there = one.call(begin_decode, name, prompt, WRITTEN, early)
        block = sum(shard.record_bytes for shard in early.shards)
        assert STEP // BLOCK_SIZE * block <= there < len(prompt) // BLOCK_SIZE * block
        first = two.call(end_prefill, name)
        one.call(pulled, name, 1)
        last = one.call(end_decode, name, first.tokens, manifest_of(first))
        assert first.tokens + last.tokens == expected
        assert two.call(held) == (0, 0)
