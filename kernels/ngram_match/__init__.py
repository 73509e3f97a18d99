"""Draft by n-gram matching: find a text's last tokens earlier in it, and draft the tokens that followed.

This is prompt lookup decoding (Saxena, 2023). README.md defines the matches and describes the search.
"""

from __future__ import annotations

from typing import Any

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
    """Continue each request's text after its longest match of min_n to max_n tokens, the latest if several.

    tokens [rows, width] int32: the texts. lengths [rows] int32: their lengths. rows [batch] int64: each
    request's row; None: the first `batch` rows. tails [batch, n], any integer type: tokens that follow a
    request's text; None: no such tokens. limits [batch] int32: maximum drafts per request.

    Fills drafts [batch, k], any integer type, and counts [batch] int32: min(limit, k) drafts per request,
    or none if its last min_n tokens do not occur earlier. Elements after a request's drafts are not written.
    The last dimension of `tokens`, `drafts` and `tails` must be contiguous.

    On a GPU this is one launch, which does not wait for the host; a CUDA graph may capture it. Two
    launches must not use a `workspace`, from `new_workspace`, at the same time; without one, each call makes
    its own. Raises ValueError for arguments that do not fit.
    """
    if not 1 <= min_n <= max_n:
        raise ValueError(f"n-grams of {min_n} to {max_n} tokens: give 1 <= min_n <= max_n")
    _check_types(tokens=tokens, lengths=lengths, limits=limits, counts=counts)
    if drafts.shape[0] != limits.shape[0] or counts.shape != limits.shape:
        raise ValueError(
            f"drafts {tuple(drafts.shape)}, counts {tuple(counts.shape)} and limits {tuple(limits.shape)} "
            "must have the same number of requests"
        )
    if not limits.shape[0]:
        return
    tensors = tokens, lengths, limits, drafts, counts
    options: dict[str, Any] = {"min_n": min_n, "max_n": max_n, "rows": rows, "tails": tails}
    if tokens.is_cuda:
        from baton.kernels.ngram_match import gpu

        if workspace is None:
            workspace = new_workspace(limits.shape[0], tokens.device)
        gpu.ngram_match(*tensors, **options, workspace=workspace)
    else:
        from baton.kernels.ngram_match import cpu

        cpu.ngram_match(*tensors, **options)


def new_workspace(batch: int, device: torch.device | str) -> torch.Tensor:
    """Allocate the memory that a launch's programs share, for `batch` requests; each launch clears it."""
    return torch.zeros(2, batch, dtype=torch.int64, device=device)


def _check_types(**tensors: torch.Tensor) -> None:
    for name, one in tensors.items():
        if one.dtype != torch.int32:
            raise ValueError(f"{name} is {one.dtype}: it must be int32")
