"""Verification: the target accepts drafted tokens, and adds one token of its own; see README.md."""

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

    logits [N, V] of float32, float16 or bfloat16: the target's, for the position of each draft and, for each
    request, for the one after them; penalties and masks are applied, temperature and filters are not. They
    are left as they are. positions [N] int64: each row's position in its text; a request's random numbers are
    a function of its seed, the row's position and the row's number in the request. None: of the number alone,
    for callers that give a new seed each time.

    `standard`: speculative sampling (Leviathan et al., 2023; Chen et al., 2023). `block`: block verification
    (Sun et al., 2024), which accepts no fewer tokens on average. At temperature 0 drafts are accepted as long
    as they are the most likely tokens, of equal ones the first.

    On a GPU nothing waits for the host, and all of it may be captured into a CUDA graph. Raises ValueError
    for shapes that do not fit together.
    """
    job = Job(logits, drafts, sampling, method, positions)
    if logits.is_cuda:
        from baton.kernels.verify import gpu

        return gpu.verify(job)
    from baton.kernels.verify import cpu

    return cpu.verify(job)
