"""Apply min-p, top-k and top-p to rows of logits on the CPU, without sorting.

A cut is the smallest logit that is kept, and the last place in the vocabulary where that logit is kept. Among
equal logits the first ones are kept, as in vLLM's GPU kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FIRST_WIDTH = 256  # most cuts are among this many of a row's largest logits
_WIDER = 8


@dataclass(frozen=True)
class Filters:
    top_k: torch.Tensor  # int64; V or more keeps all tokens
    top_p: torch.Tensor  # float32; 1 or more keeps all tokens
    min_p: torch.Tensor  # float32; 0 keeps all tokens

    def of(self, which: torch.Tensor) -> Filters:
        """Return the filters of these rows."""
        return Filters(self.top_k[which], self.top_p[which], self.min_p[which])

    def active(self, vocabulary: int) -> torch.Tensor:
        """Return [M] bool: which rows are filtered."""
        return (self.top_k < vocabulary) | (self.top_p < 1) | (self.min_p > 0)


@dataclass(frozen=True)
class Cuts:
    """The cut of each row, [M]; -inf and V where all tokens are kept."""

    value: torch.Tensor  # float32, of the logits as given
    last: torch.Tensor  # int64
    mass: torch.Tensor  # float32: sum of exp(scaled logit - largest scaled logit) over the kept tokens

    @classmethod
    def none(cls, mass: torch.Tensor, vocabulary: int) -> Cuts:
        """Return cuts that keep all tokens."""
        return cls(
            torch.full_like(mass, float("-inf")),
            torch.full_like(mass, vocabulary, dtype=torch.int64),
            mass.clone(),
        )

    def kept(self, rows: torch.Tensor, logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return [M', n] bool: which logits of these rows, at these places in the vocabulary, are kept."""
        value, last = self.value[rows].unsqueeze(1), self.last[rows].unsqueeze(1)
        return (logits > value) | ((logits == value) & (places <= last))


def find(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, mass: torch.Tensor, filters: Filters
) -> Cuts:
    """Find the cuts of [M, V] float32 logits without nan. mass: [M], the total over all tokens."""
    vocabulary = logits.shape[1]
    cuts = Cuts.none(mass, vocabulary)
    left = filters.active(vocabulary).nonzero().flatten()
    width = _FIRST_WIDTH
    while left.numel():
        width = min(width, vocabulary)
        rows = logits[left]
        values = rows.topk(width).values
        weights = ((values - values[:, :1]) * inverse_temperature[left].unsqueeze(1)).exp().double()
        kept, sure = _kept(weights, mass[left].double(), filters.of(left), vocabulary)
        found = left[sure]
        count = kept[sure].sum(1, keepdim=True).clamp(min=1)
        value = values[sure].gather(1, count - 1)
        cuts.value[found] = value.squeeze(1)
        cuts.mass[found] = (weights[sure] * kept[sure]).sum(1).float()
        ties = (values[sure] == value) & kept[sure]
        cuts.last[found] = _last(rows[sure], value, ties.sum(1))
        left, width = left[~sure], width * _WIDER
    return cuts


def _kept(
    weights: torch.Tensor, mass: torch.Tensor, filters: Filters, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of each row's largest logits are kept, and [M] whether all other logits are cut."""
    width = weights.shape[1]
    order = torch.arange(width)
    kept = (order < filters.top_k.unsqueeze(1)) & (weights >= filters.min_p.unsqueeze(1))
    whole = ~kept[:, -1] | (filters.top_k <= width)
    if width == vocabulary:
        whole = torch.ones_like(whole)
    weights = weights * kept
    # With top-p alone, the row's total mass is known in advance.
    alone = (filters.top_k >= vocabulary) & (filters.min_p == 0)
    total = torch.where(alone, mass, weights.sum(1))
    before = weights.cumsum(1) - weights
    nucleus = kept & (before < (filters.top_p * total).unsqueeze(1))
    kept = torch.where((filters.top_p < 1).unsqueeze(1), nucleus, kept)
    return kept, whole | (alone & ~kept[:, -1])


def _last(rows: torch.Tensor, value: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
    """Return [M]: the place of the `ties`-th logit with this value in each row."""
    equal = rows == value
    last = torch.full_like(ties, rows.shape[1])
    split = (equal.sum(1) > ties).nonzero().flatten()
    if split.numel():
        reached = equal[split].cumsum(1) >= ties[split].unsqueeze(1)
        last[split] = reached.int().argmax(1)
    return last
