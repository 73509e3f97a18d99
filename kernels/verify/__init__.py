"""Verify drafted tokens against the target's logits, and sample one more token; see README.md."""

from __future__ import annotations

import torch

from baton.kernels.verify.inputs import TILE, DraftedTokens, Job, Method, Sampling, Verified

__all__ = ["TILE", "DraftedTokens", "Job", "Method", "Sampling", "Verified", "verify"]


def verify(
    logits: torch.Tensor,
    drafts: DraftedTokens,
    sampling: Sampling,
    *,
    method: Method = "standard",
    positions: torch.Tensor | None = None,
) -> Verified:
    """Accept drafts so that the output is distributed as if the target had sampled it token by token.

    logits [N, V] of float32, float16 or bfloat16: the target's, one row for each draft's position and one for
    the position after a request's drafts. Penalties and masks have been applied, temperature and filters have
    not. The logits are not modified. positions [N] int64: each row's position in its text. A request's random
    numbers depend on its seed, the row's position and the row's number in the request; without positions, on
    seed and number alone, for callers that pass a new seed each time.

    `standard`: speculative sampling (Leviathan et al., 2023; Chen et al., 2023). `block`: block verification
    (Sun et al., 2024), which accepts no fewer tokens on average. At temperature 0 a draft is accepted if it
    is the most likely token, or the first of several equally likely ones.

    On a GPU nothing waits for the host, and a CUDA graph may capture all launches. Raises ValueError if the
    shapes do not fit together.
    """
    job = Job(logits, drafts, sampling, method, positions)
    if logits.is_cuda:
        from baton.kernels.verify import gpu

        return gpu.verify(job)
    from baton.kernels.verify import cpu

    return cpu.verify(job)
