"""Mamba-2's CPU functions with drafts, compared with processing one token after another."""

import random

import pytest
import torch
from vllm.config import MambaConfig
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.ops import ssu_dispatch
from vllm.platforms import current_platform

from baton.services.engine.patches import table

KERNEL, MOST, HEADS, SIZE, STATE, SLOTS, REQUESTS, STEPS = 4, 3, 2, 16, 16, 9, 2, 10
CHANNELS, PLACES = 48, KERNEL - 1 + MOST

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the patch is for CPU engines")


@pytest.fixture(scope="module", autouse=True)
def _mended():
    table.install()
    with torch.random.fork_rng(), pytest.MonkeyPatch.context() as patched:
        torch.manual_seed(0)
        backend = ssu_dispatch.CPUSSUBackend(MambaConfig())  # an engine's worker chooses it, too
        patched.setattr(ssu_dispatch, "_mamba_ssu_backend", backend)
        yield


def steps(counts):
    """Yield each step's tokens per request, and how many tokens of the last step were accepted."""
    draw, accepted = random.Random(1), [1] * REQUESTS
    for each in counts:
        yield each, accepted
        accepted = [draw.randint(1, count) for count in each]


RAGGED = [[1 + (step * 7 + row * 3) % (MOST + 1) for row in range(REQUESTS)] for step in range(STEPS)]
INDICES = torch.arange(1, SLOTS).reshape(REQUESTS, MOST + 1).to(torch.int32)


def ends(counts):
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def convolves(update):
    weight, bias = torch.randn(CHANNELS, KERNEL), torch.randn(CHANNELS)
    buffer = torch.zeros(SLOTS, PLACES, CHANNELS).transpose(1, 2)
    history, last = [torch.zeros(KERNEL - 1, CHANNELS)] * REQUESTS, [torch.zeros(1, CHANNELS)] * REQUESTS
    right = True
    for counts, accepted in steps(RAGGED):
        history = [
            torch.cat([old, own[:count]]) for old, own, count in zip(history, last, accepted, strict=True)
        ]
        last = [torch.randn(count, CHANNELS) for count in counts]
        made = update(
            torch.cat(last),
            buffer,
            weight,
            bias,
            "silu",
            conv_state_indices=INDICES,
            num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
            query_start_loc=ends(counts),
            max_query_len=MOST + 1,
        )
        wanted = []
        for old, own in zip(history, last, strict=True):
            whole = torch.cat([old[-(KERNEL - 1) :], own]).T.unsqueeze(0)
            wanted.append(torch.nn.functional.conv1d(whole, weight.unsqueeze(1), bias, groups=CHANNELS)[0].T)
        right = right and torch.allclose(made, torch.nn.functional.silu(torch.cat(wanted)), atol=1e-4)
    return right


def keeps_states(update):
    A = -torch.rand(HEADS)[:, None, None].expand(-1, SIZE, STATE)
    D, bias = torch.ones(HEADS)[:, None].expand(-1, SIZE), torch.full((HEADS,), 0.5)[:, None].expand(-1, SIZE)
    states, right = torch.randn(SLOTS, HEADS, SIZE, STATE), True
    for counts, accepted in steps(RAGGED):
        tokens, before = sum(counts), states.clone()
        x, dt = torch.randn(tokens, HEADS, SIZE), torch.randn(tokens, HEADS)[:, :, None].expand(-1, -1, SIZE)
        B, C, out = torch.randn(tokens, 1, STATE), torch.randn(tokens, 1, STATE), torch.zeros_like(x)
        update(
            states,
            x,
            dt,
            A,
            B,
            C,
            D,
            bias,
            dt_softplus=True,
            state_batch_indices=INDICES,
            dst_state_batch_indices=INDICES,
            out=out,
            num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
            cu_seqlens=ends(counts),
        )
        at = 0
        for row, count in enumerate(counts):
            state = before[INDICES[row, accepted[row] - 1]]
            for token in range(count):
                delta = torch.nn.functional.softplus(dt[at] + bias)
                state = state * torch.exp(A * delta[..., None]) + (delta * x[at])[..., None] * B[at][:, None]
                wanted = (state * C[at][:, None]).sum(-1) + D * x[at]
                right = right and torch.allclose(out[at], wanted, atol=1e-4)
                right = right and torch.allclose(states[INDICES[row, token]], state, atol=1e-4)
                at += 1
    return right


@pytest.mark.parametrize(
    ("name", "holds"), [("causal_conv1d_update", convolves), ("selective_state_update", keeps_states)]
)
def test_any_number_of_drafts_is_verified(name, holds):
    mended = getattr(mamba_mixer2, name)
    assert holds(mended)
    try:
        assert not holds(mended.__wrapped__), "cpu.mamba_drafts can go"
    except RuntimeError:  # it refuses the shapes
        return
