"""The definition of `ngram_match`, with loops over lists."""

from __future__ import annotations

import torch


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
) -> None:
    """Like `baton.kernels.ngram_match.ngram_match`, on tensors of any device."""
    for request in range(limits.shape[0]):
        row = request if rows is None else int(rows[request])
        text = tokens[row, : int(lengths[row])].tolist()
        if tails is not None:
            text += tails[request].tolist()
        limit = min(int(limits[request]), drafts.shape[1])
        found = continuation(text, limit, min_n, max_n)
        counts[request] = len(found)
        for place, token in enumerate(found):
            drafts[request, place] = token


def continuation(text: list[int], limit: int, min_n: int, max_n: int) -> list[int]:
    """Return the `limit` tokens that follow the last of the longest matches, or none without a match."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):  # the match is text[end - n : end]
            if text[end - n : end] == text[len(text) - n :]:
                longer = list(text)
                for step in range(limit):
                    longer.append(longer[end + step])
                return longer[len(text) :]
    return []
