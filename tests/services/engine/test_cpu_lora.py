"""Adapters on a CPU, compared with multiplying row by row."""

import pytest
import torch
from vllm.lora.layers import LoRAMapping

from baton.services.engine.cpu_lora import GroupedPunica

PLACES = 3
RANK, INPUTS = 4, 24
SLICES = (16, 8)
# Adapter ids by token; 0 means no adapter. Adapter 7 is in the last place, and 5 in the first.
BATCHES = [[0], [7], [0, 0, 0], [7, 7], [5, 0, 7, 7, 0, 5, 0], [0, 7], [5, 7, 5]]
IDS = [5, None, 7]


def made(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("ids", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_gets_its_own_adapter_or_none(ids, dtype):
    punica = GroupedPunica(64, 8, "cpu")
    punica.update_metadata(LoRAMapping(tuple(ids), tuple(ids), is_prefill=True), IDS, PLACES, 100)
    x = made(len(ids), INPUTS).to(dtype)
    down = tuple(made(PLACES, 1, RANK, INPUTS + n).to(dtype)[..., :INPUTS] for n in range(2))
    up = tuple(made(PLACES, 1, size, RANK).to(dtype) for size in SLICES)
    y = made(len(ids), sum(SLICES)).to(dtype)
    expected, logits = y.clone(), y.clone()
    for row, one in enumerate(ids):
        if one:
            place = IDS.index(one)
            low = [2.0 * (a[place, 0].float() @ x[row].float()) for a in down]
            added = [(b[place, 0] @ part.to(dtype)) for b, part in zip(up, low, strict=True)]
            expected[row] += torch.cat(added)
            logits[row, : SLICES[0]] += added[0]
    first = y.clone()
    punica.add_lora_linear(y, x, down, up, 2.0, SLICES)
    punica.add_lora_logits(first, x, down[0], up[0], 2.0)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(first, logits)
    none = [row for row, one in enumerate(ids) if not one]
    assert torch.equal(y[none], expected[none])


def test_a_drafter_that_shares_a_layer_gets_no_adapter():
    """Its passes have a different number of tokens than the step."""
    punica = GroupedPunica(64, 8, "cpu")
    punica.update_metadata(LoRAMapping((7, 7, 7), (7,), is_prefill=True), IDS, PLACES, 100)
    y = made(2, SLICES[0])
    before = y.clone()
    punica.add_lora_embedding(y, made(2, RANK), made(PLACES, 1, SLICES[0], RANK))
    assert torch.equal(y, before)
