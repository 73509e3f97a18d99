"""An engine's cores, memory, blocks and prompt share."""

import os
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CacheConfig, ModelConfig
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import update_kv_cache_capacity
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    is_full_attention_spec,
)
from vllm.v1.worker.utils import request_memory

from baton.services.engine.args import largest_image
from baton.services.engine.build import (
    _add_encoding,
    _gpu_arguments,
    cores_of_ranks,
    measures_share,
    parse_cores,
)
from baton.services.engine.data_parallel import GangRank
from baton.services.engine.info import _block_share, _block_size
from baton.services.engine.refusals import reason
from baton.services.errors import ConfigError
from harness.architectures.registry import VISIONS
from tests.services.engine.plans import built, plan

OURS = sorted(os.sched_getaffinity(0))
GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "cores"), [("0", [0]), ("0-1", [0, 1]), ("1,0", [0, 1]), ("0-0,1", [0, 1]), ("0,0", [0])]
)
def test_cores_are_parsed(text, cores):
    if set(cores) <= set(OURS):
        assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "2-1", "0;1", "99999"])
def test_invalid_cores_are_refused(text):
    with pytest.raises(ConfigError, match=r"worker\.cpu"):
        parse_cores(text)


def test_ranks_share_the_cores_evenly():
    shares = [share.split(",") for share in cores_of_ranks("", len(OURS)).split("|")]
    assert [int(core) for (core,) in shares] == OURS
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        cores_of_ranks(str(OURS[0]), 2)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({}, r"^engine\.data_parallel_size \(value 2\): .* has no experts"),
        (
            {"pipeline_parallel_size": 2},
            r"^engine\.pipeline_parallel_size \(value 2\): .* cannot have stages",
        ),
    ],
)
def test_gangs_that_cannot_be(more, problem):
    with pytest.raises(ConfigError, match=problem):
        built(gang=GangRank(0, "127.0.0.1", 1, "127.0.0.1"), data_parallel_size=2, **more)


def request(args, free_gib):
    """Request memory as vLLM does when an engine starts on a GPU of 80 GiB."""
    snapshot = SimpleNamespace(total_memory=80 * GIB, free_memory=int(free_gib * GIB), device_="cuda:0")
    return int(request_memory(snapshot, CacheConfig(**args)))


def test_an_encode_worker_of_a_model_without_images():
    with pytest.raises(ConfigError, match="takes no images: leave out encode workers"):
        built(encodes=True)


def test_a_worker_starts_on_a_gpu_that_others_use():
    """Others use 50 of 80 GiB, and the worker's KV cache fits into the rest."""
    args = {"kv_cache_memory_bytes": 20 * GIB}
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request(args, free_gib=30)
    _gpu_arguments(args, total=80 * GIB)
    assert request(args, free_gib=30) == 20 * GIB


def test_a_kv_cache_that_does_not_fit_is_reported():
    args = {"kv_cache_memory_bytes": 20 * GIB}
    _gpu_arguments(args, total=80 * GIB)
    with pytest.raises(ValueError, match="GPU memory") as caught:
        request(args, free_gib=15)
    assert reason(caught.value) == (
        "20.0 GiB of the GPU's memory are needed, and 15.0 of 80.0 GiB are free: lower engine.kv_cache_gib "
        "(--kv-cache-gib), put fewer workers on this GPU (fleet.devices), or end what else uses it"
    )
    args = {"kv_cache_memory_bytes": 200 * GIB}
    _gpu_arguments(args, total=80 * GIB)
    assert args["gpu_memory_utilization"] == 1.0


def test_without_a_given_kv_cache_vllm_decides():
    args = {}
    _gpu_arguments(args, total=80 * GIB)
    assert args == {}
    args = {"kv_cache_memory_bytes": GIB, "gpu_memory_utilization": 0.5}  # from engine.extra
    _gpu_arguments(args, total=80 * GIB)
    assert args["gpu_memory_utilization"] == 0.5


def full(block_size):
    return MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def window(block_size, tokens, page):
    return SlidingWindowMLASpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.bfloat16,
        sliding_window=tokens,
        page_size_padded=page,
    )


PAGE = full(256).page_size_bytes


def engine_with(groups, blocks):
    """Return a stand-in for an engine whose pool has these groups."""
    config = built(max_model_len=2_048, max_num_seqs=8)
    named = [KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(groups)]
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=named)
    config.cache_config.num_gpu_blocks = blocks
    config.cache_config.block_size = min(spec.block_size for spec in groups)  # EngineCore sets it like this
    whole = {spec.block_size for spec in groups if is_full_attention_spec(spec)}
    config.cache_config.effective_attention_block_size = next(iter(whole), None)  # vLLM does it like this
    update_kv_cache_capacity(config, cache)
    return SimpleNamespace(vllm_config=config, scheduler=SimpleNamespace(kv_cache_config=cache))


@pytest.mark.parametrize(
    ("groups", "blocks"),
    [
        ([full(256), window(64, 128, PAGE)], 700),  # as in DeepSeek-V4
        ([full(64), window(64, 128, full(64).page_size_bytes)], 700),
        ([full(256), window(64, 128, PAGE), window(64, 512, PAGE), window(32, 64, PAGE)], 5_000),
    ],
    ids=["two sizes", "one size", "three sizes"],
)
def test_all_tokens_that_the_pool_holds_can_be_booked(groups, blocks):
    """Compare with vLLM's own count, for groups with blocks of different sizes."""
    engine = engine_with(groups, blocks)
    cache = engine.vllm_config.cache_config
    share, size, held = _block_share(engine), _block_size(cache), cache.kv_cache_size_tokens
    assert size == groups[0].block_size
    assert held - size < int(blocks * share) * size <= held
    assert share <= 1


def test_windows_alone_are_not_booked_beyond_the_pool():
    """Requests shorter than a window never give blocks back."""
    assert _block_share(engine_with([window(64, 128, PAGE)] * 2, 700)) == 1.0


@pytest.mark.parametrize(
    ("on_cpu", "extra", "measured"),
    [
        (True, {}, False),
        (False, {}, True),
        (False, {"long_prefill_token_threshold": 0}, False),
        (False, {"long_prefill_token_threshold": 512}, False),
    ],
)
def test_a_prompts_share_is_measured_on_a_gpu_unless_it_is_set(monkeypatch, on_cpu, extra, measured):
    monkeypatch.setattr(current_platform, "is_cpu", lambda: on_cpu)
    assert measures_share(plan(needs_handoffs=True, extra=extra)) is measured


def test_an_encode_workers_step_takes_its_images_and_its_requests():
    model = VISIONS["gemma3-vision"]
    target = str(model.target(model.checkpoint()))
    config = ModelConfig(model=target, dtype="float32")
    largest = largest_image(config)
    for given, least in (({}, 256), ({"max_num_batched_tokens": 1, "max_num_seqs": 300}, 300)):
        args = dict(given)
        _add_encoding(args, plan(target, encodes=True), config)
        assert args["max_num_batched_tokens"] >= max(least, largest)
