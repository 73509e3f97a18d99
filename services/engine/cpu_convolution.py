"""On a CPU, convolve a step's tokens with the requests' earlier tokens, which are kept in buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def convolved(  # noqa: PLR0917
    inputs: Any,
    weight: Any,
    bias: Any,
    silu: bool,
    counts: Sequence[int],
    buffers: Sequence[Any],
    accepted: Sequence[int],
) -> Any:
    """Return the convolved inputs, and store in the buffers what the next step may need.

    inputs: [tokens, channels], with `counts` tokens per request. weight: [channels, kernel]. buffers: one
    [channels, places] per request, whose first `kernel - 2 + tokens` places are from its last step. accepted:
    how many tokens of that step were accepted, at least 1.
    """
    import torch

    kept = weight.shape[-1] - 1
    out, first = torch.empty_like(inputs), 0
    for count, buffer, last in zip(counts, buffers, accepted, strict=True):
        own = inputs[first : first + count]
        whole = torch.cat([buffer[:, last - 1 : last - 1 + kept], own.T.to(buffer.dtype)], dim=-1)
        made = torch.nn.functional.conv1d(
            whole.unsqueeze(0).to(weight.dtype), weight.unsqueeze(1), bias, groups=len(whole)
        )[0]
        out[first : first + count] = (torch.nn.functional.silu(made) if silu else made).T.to(out.dtype)
        buffer[:, : kept + count - 1] = whole[:, 1:]
        first += count
    return out
