"""Which drafted tokens the target accepts, and the token that it puts behind them; see README.md."""

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
    """Accept drafts so that what is written is distributed as if the target had sampled it token by token.

    logits [N, V] of float32, float16 or bfloat16: the target's, of the place of each draft and, for each
    request, of the one behind them; penalties and masks applied, temperature and filters not. They are left
    as they were. positions [N] int64: where in its text each row stands; a request's random numbers are a
    function of its seed, the row's position and the row's number in the request. None: of the number alone,
    for callers that give a new seed each time.

    `standard`: speculative sampling (Leviathan et al., 2023; Chen et al., 2023). `block`: block verification
    (Sun et al., 2024), which accepts no fewer tokens on average. Temperature 0: accepted as far as the drafts
    are the most likely tokens, of equals the first.

    On a GPU nothing waits for the host, and all of it may be captured into a CUDA graph. Raises ValueError
    for shapes that do not go together.
    """
    job = Job(logits, drafts, sampling, method, positions)
    if logits.is_cuda:
        from baton.kernels.verify import gpu

        return gpu.verify(job)
    from baton.kernels.verify import cpu

    return cpu.verify(job)
