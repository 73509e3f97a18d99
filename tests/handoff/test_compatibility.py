from dataclasses import replace

import pytest

from baton.handoff import compatibility
from baton.handoff.compatibility import Facts, compatibility_hash, in_words
from baton.handoff.groups import CacheGroup
from tests.handoff.caches import make_cache

LAYERS = make_cache(3).layers
FACTS = Facts(
    vllm_version="0.32.0",
    model={"hidden_size": 128, "rope": {"theta": 10_000, "type": "default"}, "_name_or_path": "/a"},
    model_fingerprint="f00",
    dtype="torch.bfloat16",
    cache_dtype="auto",
    quantization="",
    groups=(CacheGroup(32),),
    attention_kernels="vec",
    parallel_sizes={"decode_context_parallel_size": 1},
    speculative_method="eagle",
    drafter={"hidden_size": 64},
    drafter_fingerprint="d0d",
    drafter_quantization="",
    layers=LAYERS,
)


@pytest.mark.parametrize(
    "change",
    [
        {"vllm_version": "0.32.1"},
        {"model": {"hidden_size": 128, "rope": {"theta": 20_000, "type": "default"}}},
        {"model_fingerprint": "ba4"},
        {"dtype": "torch.float16"},
        {"cache_dtype": "fp8"},
        {"quantization": "awq"},
        {"groups": (CacheGroup(16),)},
        {"groups": (CacheGroup(32, window=64),)},
        {"groups": (CacheGroup(32, state="state of gdn"),)},
        {"groups": (CacheGroup(32), CacheGroup(32))},
        {"attention_kernels": "amx"},
        {"parallel_sizes": {"decode_context_parallel_size": 2}},
        {"parallel_sizes": {"decode_context_parallel_size": 1, "tensor_parallel_size": 2}},
        {"speculative_method": "mtp"},
        {"drafter": {"hidden_size": 65}},
        {"drafter_fingerprint": "dad"},
        {"drafter_quantization": "fp8"},
        {"layers": LAYERS[:-1]},
        {"layers": LAYERS[::-1]},
        {"layers": (*LAYERS[:-1], replace(LAYERS[-1], block_strides=(1, 2, 3)))},
        {"layers": (*LAYERS[:-1], replace(LAYERS[-1], dtype="int8"))},
    ],
)
def test_every_fact_counts(change):
    changed = replace(FACTS, **change)
    assert compatibility_hash(changed) != compatibility_hash(FACTS)
    assert in_words(changed) != in_words(FACTS)


def test_workers_of_another_protocol_are_never_paired(monkeypatch):
    here, words = compatibility_hash(FACTS), in_words(FACTS)
    monkeypatch.setattr(compatibility, "PROTOCOL", compatibility.PROTOCOL + 1)
    assert compatibility_hash(FACTS) != here
    assert in_words(FACTS)["handoff protocol"] != words["handoff protocol"]


def test_a_models_path_does_not_count():
    moved = replace(
        FACTS, model={"rope": {"type": "default", "theta": 10_000}, "hidden_size": 128, "name_or_path": "b"}
    )
    assert compatibility_hash(moved) == compatibility_hash(FACTS)
    assert len(compatibility_hash(FACTS)) == 32
