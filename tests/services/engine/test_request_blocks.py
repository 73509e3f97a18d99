"""The blocks of a request, for each kind of group."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from baton.services.engine.request_blocks import most_blocks

_HEADS = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
IN_STEP = 128


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        (FullAttentionSpec(block_size=32, **_HEADS), 32),
        (SlidingWindowSpec(block_size=32, sliding_window=129, **_HEADS), 9),
        (ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=128, **_HEADS), 8),
        (CircularBufferSpec(block_size=8, **_HEADS), 1),
        (MambaSpec(block_size=1024, shapes=((4, 4),), dtypes=(torch.float32,), num_speculative_blocks=2), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_request_takes_no_more_blocks_than_vllm_gives_it(spec, most):
    config = SimpleNamespace(
        max_in_flight_tokens=IN_STEP,
        model_config=SimpleNamespace(max_model_len=1024),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    taken = most_blocks(
        SimpleNamespace(vllm_config=config, kv_cache_config=SimpleNamespace(kv_cache_groups=groups))
    )
    assert taken(1) == 1
    assert taken(1024) == most
    assert taken(3072, requests=3) == (96 if most == 32 else 3 * most)
