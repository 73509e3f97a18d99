"""Let Mamba-2 verify drafts on a CPU: its convolution and its state.

When drafts are verified, a request has several tokens in a step, the step before may have had some rejected,
and the state after each token is kept apart. The CPU's functions take one token per request and ignore the
rest.

Leans on: vllm.model_executor.layers.mamba.mamba_mixer2 (`causal_conv1d_update`: conv_state [slots, channels,
places] of kernel - 1 + most drafts places; `selective_state_update`: state [slots, heads, size, state],
arguments by token [tokens, ...]; of both their parameters, the state indices [requests, 1 + most drafts],
whose first column is the convolution's slot, num_accepted_tokens and the ends of the requests' tokens
[requests + 1]). The kernel of C++ changes the state that it reads, too, where that is another than it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.cpu_convolution import convolved
from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.model_executor.layers.mamba import mamba_mixer2

    conv = (
        *("x", "conv_state", "weight", "bias", "activation", "conv_state_indices", "query_start_loc"),
        *("pad_slot_id", "kwargs"),
    )
    replace(mamba_mixer2, "causal_conv1d_update", _convolving, conv)
    state = (
        *("state", "x", "dt", "A", "B", "C", "D", "dt_bias", "z", "dt_softplus", "state_batch_indices"),
        *(
            "dst_state_batch_indices",
            "null_block_id",
            "out",
            "num_accepted_tokens",
            "cu_seqlens",
            "is_blackwell",
        ),
    )
    replace(mamba_mixer2, "selective_state_update", _stepping, state)


def _convolving(shipped: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d_update(
        x: Any, conv_state: Any, weight: Any, bias: Any = None, activation: Any = None, **more: Any
    ) -> Any:
        accepted = more.get("num_accepted_tokens")
        if accepted is None:
            return shipped(x, conv_state, weight, bias, activation, **more)
        counts = more["query_start_loc"].diff().tolist()
        slots = more["conv_state_indices"][: len(counts), 0].tolist()
        return convolved(
            x,
            weight,
            bias,
            activation in {"silu", "swish", True},
            counts,
            [conv_state[slot] for slot in slots],
            accepted.tolist(),
        )

    return causal_conv1d_update


def _stepping(shipped: Callable[..., Any]) -> Callable[..., Any]:
    def selective_state_update(  # noqa: PLR0917 (vLLM's parameters)
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
            shipped(state, x, dt, A, B, C, D, dt_bias, out=out, num_accepted_tokens=None, **more)
            return
        slots, starts = more.pop("state_batch_indices").long(), more.pop("cu_seqlens").long()
        del more["dst_state_batch_indices"]
        counts = starts.diff()
        source = slots[: len(counts)].gather(1, num_accepted_tokens.long().unsqueeze(1) - 1).squeeze(1)
        for token in range(int(counts.max())):
            rows = (counts > token).nonzero().squeeze(1)
            at, target = starts[rows] + token, slots[rows, token]
            state[target] = state[source[rows]]
            made = out[at]
            shipped(
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

    return selective_state_update
