"""Let Mamba-2 verify drafts on a CPU.

A request then has several tokens in a step, some tokens of its last step may have been rejected, and each
token's state is kept. vLLM's CPU functions take one token per request and ignore the rest, so answers are
wrong.

Shapes: state indices [requests, 1 + maximum drafts], whose first column is the convolution's slot; conv_state
[slots, channels, kernel - 1 + maximum drafts]; state [slots, heads, size, state].
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.cpu_convolution import convolved
from baton.services.engine.patches.replace import replaces


@replaces(
    "vllm.model_executor.layers.mamba.mamba_mixer2:causal_conv1d_update",
    *("x", "conv_state", "weight", "bias", "activation", "conv_state_indices", "query_start_loc"),
    *("pad_slot_id", "kwargs"),
)
def _convolve(  # noqa: PLR0917 (vLLM's parameters)
    original: Any, x: Any, conv_state: Any, weight: Any, bias: Any = None, activation: Any = None, **more: Any
) -> Any:
    accepted = more.get("num_accepted_tokens")
    if accepted is None:
        return original(x, conv_state, weight, bias, activation, **more)
    counts = more["query_start_loc"].diff().tolist()
    buffers = [conv_state[slot] for slot in more["conv_state_indices"][: len(counts), 0].tolist()]
    silu = activation in {"silu", "swish", True}
    return convolved(x, weight, bias, silu, counts, buffers, accepted.tolist())


@replaces(
    "vllm.model_executor.layers.mamba.mamba_mixer2:selective_state_update",
    *("state", "x", "dt", "A", "B", "C", "D", "dt_bias", "z", "dt_softplus", "state_batch_indices"),
    *("dst_state_batch_indices", "null_block_id", "out", "num_accepted_tokens", "cu_seqlens"),
    "is_blackwell",
)
def _update_states(  # noqa: PLR0917 (vLLM's parameters)
    original: Any,
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    dt_bias: Any,
    *,
    out: Any,
    num_accepted_tokens: Any = None,
    **more: Any,
) -> None:
    if num_accepted_tokens is None:
        original(state, x, dt, A, B, C, D, dt_bias, out=out, num_accepted_tokens=None, **more)
        return
    slots, starts = more.pop("state_batch_indices").long(), more.pop("cu_seqlens").long()
    del more["dst_state_batch_indices"]
    counts = starts.diff()
    source = slots[: len(counts)].gather(1, num_accepted_tokens.long().unsqueeze(1) - 1).squeeze(1)
    for token in range(int(counts.max())):
        rows = (counts > token).nonzero().squeeze(1)
        at, target = starts[rows] + token, slots[rows, token]
        state[target] = state[source[rows]]  # vLLM's C++ kernel also changes the state that it reads
        made = out[at]
        original(
            state,
            x[at],
            dt[at],
            A,
            B[at],
            C[at],
            D,
            dt_bias,
            state_batch_indices=target.int(),
            dst_state_batch_indices=target.int(),
            out=made,
            num_accepted_tokens=None,
            cu_seqlens=None,
            **more,
        )
        out[at] = made
        source[rows] = target
