"""Gated DeltaNet on CPUs with varying numbers of drafts, compared with one convolution of the whole text."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.platforms import current_platform

from baton.services.engine.patches import table

KERNEL, MOST, HEAD, SLOTS, REQUESTS, STEPS = 4, 3, 128, 9, 2, 12
CHANNELS, PLACES = 3 * HEAD, KERNEL - 1 + MOST
BF16 = torch.cpu._is_avx512_bf16_supported()

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the patch is for CPU engines")


@pytest.fixture(scope="module", autouse=True)
def _mended():
    table.install()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


class Layer:
    """One layer's weights, buffers of two requests, and the last result of its convolution."""

    def __init__(self, *, packed):
        weight = (torch.randn(CHANNELS, KERNEL) * 0.5).bfloat16()
        self.plain = weight
        self.conv1d = SimpleNamespace(weight=weight, bias=None, _cpu_unpacked_conv_weight=weight)
        if packed:
            self.conv1d.weight = _custom_ops.causal_conv1d_weight_pack(weight)
        self.activation = "silu"
        self.A_log, self.dt_bias = torch.zeros(1), torch.zeros(1).bfloat16()
        self.buffer = torch.zeros(SLOTS, PLACES, CHANNELS).bfloat16().transpose(1, 2)
        self.states = torch.zeros(SLOTS, 1, HEAD, HEAD)
        self.convolved = torch.empty(0)

    def rearrange_mixed_qkv(self, mixed):
        self.convolved = mixed.clone()
        return (part.reshape(1, len(mixed), 1, HEAD).contiguous() for part in mixed.split(HEAD, dim=-1))


def right(layer, spec_forward, counts):
    """Run steps with these numbers of tokens, some accepted. Return whether all were convolved rightly."""
    draw, ends = random.Random(1), True
    history = [torch.zeros(KERNEL - 1, CHANNELS).bfloat16() for _ in range(REQUESTS)]
    accepted = [1] * REQUESTS
    slots = torch.arange(1, SLOTS).reshape(REQUESTS, MOST + 1).to(torch.int32)
    for each in counts:
        inputs = [torch.randn(count, CHANNELS).bfloat16() for count in each]
        ends_at = torch.tensor([0, *each]).cumsum(0).to(torch.int32)
        metadata = SimpleNamespace(
            num_spec_decodes=REQUESTS,
            spec_state_indices_tensor=slots,
            spec_query_start_loc=ends_at,
            num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
        )
        gates = torch.zeros(sum(each), 1).bfloat16()
        spec_forward(
            layer, metadata, torch.cat(inputs), gates, gates, layer.buffer, layer.states, KERNEL, PLACES
        )
        wanted = []
        for request, mine in enumerate(inputs):
            whole = torch.cat([history[request][-(KERNEL - 1) :], mine]).float().T.unsqueeze(0)
            made = torch.nn.functional.conv1d(whole, layer.plain.float().unsqueeze(1), groups=CHANNELS)
            wanted.append(torch.nn.functional.silu(made)[0].T)
            accepted[request] = draw.randint(1, len(mine))
            history[request] = torch.cat([history[request], mine[: accepted[request]]])
        ends = ends and torch.allclose(layer.convolved.float(), torch.cat(wanted), atol=0.05, rtol=0.05)
    return ends


# Tokens per request in each step.
COUNTS = {
    "varied": [
        [1 + (step * 7 + request * 3) % (MOST + 1) for request in range(REQUESTS)] for step in range(STEPS)
    ],
    "equal": [[1 + (step * 3) % (MOST + 1)] * REQUESTS for step in range(STEPS)],  # for the C++ kernel
    "undrafted": [[1] * REQUESTS] * STEPS,
    "most": [[MOST + 1] * REQUESTS] * STEPS,
}
NATIVE = pytest.param(True, marks=pytest.mark.skipif(not BF16, reason="needs AVX512-BF16"))


@pytest.mark.parametrize("native", [False, NATIVE])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_tokens_are_convolved_with_those_before_them(counts, native, monkeypatch):
    """The C++ kernel is chosen on CPUs with AMX; it also runs on others."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: native)
    assert right(Layer(packed=native), gdn_attention._spec_forward, counts)


def test_vllm_as_shipped_reads_inputs_that_are_too_old(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    shipped = gdn_attention._spec_forward
    assert right(Layer(packed=False), shipped.__wrapped__, COUNTS["most"])
    assert not right(Layer(packed=False), shipped.__wrapped__, COUNTS["undrafted"]), "cpu.gdn_conv can go"
    with pytest.raises(RuntimeError, match="size of tensor"):  # a step has fewer tokens than were accepted
        right(Layer(packed=False), shipped.__wrapped__, COUNTS["varied"])
