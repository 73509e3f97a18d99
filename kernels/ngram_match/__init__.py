"""N-gram matches of a whole batch: what followed the last tokens of a text when they were last seen in it.

After prompt lookup decoding (Saxena, 2023). README.md says what exactly is found, and how.
"""

from __future__ import annotations

import torch

__all__ = ["new_workspace", "ngram_match"]


def ngram_match(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    *,
    min_n: int,
    max_n: int,
    rows: torch.Tensor | None = None,
    tails: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Continue each request's text by its most recent longest match, of max_n down to min_n tokens.

    tokens [rows, width] int32 and lengths [rows] int32: texts, and how many tokens of each count.
    rows [batch] int64: which of them is a request's; None: the first `batch`, in order.
    tails [batch, n], of any integer type: tokens that stand behind a request's text; None: none do.
    limits [batch] int32: most drafts.

    Fills drafts [batch, k], of any integer type, and counts [batch] int32: min(limit, k) drafts of a request,
    or none where its last min_n tokens were not seen before. What lies behind a request's drafts is left as
    it was. The last dimension of `tokens`, `drafts` and `tails` must be contiguous.

    On a GPU this is one launch that does not wait for the host, and that a CUDA graph may capture.
    `workspace`, of `new_workspace`, may not be used by two launches at a time; each call without one makes
    its own. Elsewhere numba computes the same. Raises ValueError for what it cannot take.
    """
    if not 1 <= min_n <= max_n:
        raise ValueError(f"n-grams of {min_n} to {max_n} tokens: give 1 <= min_n <= max_n")
    _check_types(tokens=tokens, lengths=lengths, limits=limits, counts=counts)
    if drafts.shape[0] != limits.shape[0] or counts.shape != limits.shape:
        raise ValueError(
            f"drafts {tuple(drafts.shape)}, counts {tuple(counts.shape)} and limits {tuple(limits.shape)} "
            "must be of as many requests"
        )
    if not limits.shape[0]:
        return
    if tokens.is_cuda:
        from baton.kernels.ngram_match import gpu

        if workspace is None:
            workspace = new_workspace(limits.shape[0], tokens.device)
        gpu.ngram_match(
            *(tokens, lengths, limits, drafts, counts),
            min_n=min_n,
            max_n=max_n,
            rows=rows,
            tails=tails,
            workspace=workspace,
        )
    else:
        from baton.kernels.ngram_match import cpu

        cpu.ngram_match(
            *(tokens, lengths, limits, drafts, counts), min_n=min_n, max_n=max_n, rows=rows, tails=tails
        )


def new_workspace(batch: int, device: torch.device | str) -> torch.Tensor:
    """What the programs of a launch of up to `batch` requests share; each launch leaves it as new."""
    return torch.zeros(2, batch, dtype=torch.int64, device=device)


def _check_types(**tensors: torch.Tensor) -> None:
    for name, one in tensors.items():
        if one.dtype != torch.int32:
            raise ValueError(f"{name} is {one.dtype}: it must be int32")
