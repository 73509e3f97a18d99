"""The arguments and results of `verify`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

Method = Literal["standard", "block"]
TILE = 1024  # vocabulary tokens whose weights are summed together


@dataclass(frozen=True)
class DraftedTokens:
    """The drafted tokens of R requests; request r has c[r], which may be 0.

    N = sum(c + 1), D = sum(c). A negative token, or one beyond the vocabulary, is a placeholder: neither it
    nor any token after it is accepted. At most one of `probs` and `logits` is given. Without either, the
    drafter was certain of each token (greedy, or a match), so its distribution is one-hot.
    """

    tokens: torch.Tensor  # int [D]; or [N], where a request's drafts follow the token that they continue
    row_ends: torch.Tensor  # [R] int32: cumsum(c + 1), where each request's rows of logits end
    most: int  # an upper bound on c, known to the host
    probs: torch.Tensor | None = None  # [D, V] float32: the distribution each draft was drawn from
    logits: torch.Tensor | None = None  # [slots, at least most, V]: the drafter's logits, before temperature


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters, [S]: S is R, or any number if `slots` maps requests to places.

    Filters apply in vLLM's order: min-p, top-k, then top-p of the renormalised rest. None means that no
    request has that filter. The drafter's distribution is not filtered.
    """

    temperature: torch.Tensor  # [S] float32; 0 is greedy
    seeds: torch.Tensor  # [S] int64
    top_k: torch.Tensor | None = None  # [S] int32; 0, or V or more, keeps all tokens
    top_p: torch.Tensor | None = None  # [S] float32 in (0, 1]; 1 keeps all tokens
    min_p: torch.Tensor | None = None  # [S] float32 in [0, 1]; 0 keeps all tokens
    slots: torch.Tensor | None = None  # [R] int32 or int64


@dataclass(frozen=True)
class Verified:
    tokens: torch.Tensor  # [R, most + 1] int32: accepted drafts, one token sampled from the target, then -1
    counts: torch.Tensor  # [R] int32: 1 + accepted drafts


@dataclass(frozen=True)
class Job:
    """The checked arguments of `verify`, which each of its forms takes."""

    logits: torch.Tensor  # [N, V]
    drafts: DraftedTokens
    sampling: Sampling
    method: Method
    positions: torch.Tensor | None = None  # [N] int64
    tile: int = field(default=TILE)  # a power of two

    def __post_init__(self) -> None:
        for problem in self._problems():
            if problem:
                raise ValueError(problem)

    @property
    def requests(self) -> int:
        """The number of requests, R."""
        return int(self.drafts.row_ends.shape[0])

    @property
    def packed(self) -> bool:
        """Whether `drafts.tokens` is [D], without the tokens that the drafts continue."""
        return bool(self.drafts.tokens.shape[0] != self.logits.shape[0])

    @property
    def filtered(self) -> bool:
        """Whether any request may have a filter."""
        sampling = self.sampling
        return not (sampling.top_k is None and sampling.top_p is None and sampling.min_p is None)

    def _problems(self) -> tuple[str | None, ...]:
        logits, drafts, sampling = self.logits, self.drafts, self.sampling
        rows, vocabulary = logits.shape
        drafted = rows - self.requests
        shapes = {
            "drafts.probs": (drafts.probs, (drafted, vocabulary)),
            "positions": (self.positions, (rows,)),
            "slots": (sampling.slots, (self.requests,)),
        }
        if sampling.slots is None:
            for name in ("temperature", "seeds", "top_k", "top_p", "min_p"):
                shapes[name] = getattr(sampling, name), (self.requests,)
        wrong = [
            f"{name} is {tuple(one.shape)}: it must be {wanted}"
            for name, (one, wanted) in shapes.items()
            if one is not None and tuple(one.shape) != wanted
        ]
        return (
            f"method {self.method!r}: give 'standard' or 'block'"
            if self.method not in ("standard", "block")
            else None,
            "logits must be contiguous in the vocabulary" if logits.stride(1) != 1 else None,
            f"{drafts.tokens.shape[0]} draft tokens: {drafted} are expected, or one for each of {rows} rows"
            if drafts.tokens.shape[0] not in (drafted, rows)
            else None,
            "give drafts.probs or drafts.logits, not both"
            if drafts.probs is not None and drafts.logits is not None
            else None,
            _wrong_logits(drafts, vocabulary),
            *wrong,
        )


def _wrong_logits(drafts: DraftedTokens, vocabulary: int) -> str | None:
    logits = drafts.logits
    if logits is None:
        return None
    if logits.dim() != 3 or logits.shape[1] < drafts.most or logits.shape[2] != vocabulary:
        return (
            f"drafts.logits is {tuple(logits.shape)}: it must be [slots, {drafts.most} or more, {vocabulary}]"
        )
    return "drafts.logits must be contiguous in the vocabulary" if logits.stride(2) != 1 else None
