"""Jobs for `verify`: random logits, ragged drafts, and requests with varied sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.kernels.verify import DraftedTokens, Job, Method, Sampling


@dataclass(frozen=True)
class Shape:
    """The shape of a job. filters: a letter per filter, k (top-k), p (top-p), m (min-p)."""

    requests: int = 3
    most: int = 3
    vocabulary: int = 61
    tile: int = 16
    method: Method = "standard"
    proposal: str = "one-hot"  # or "probs", "logits"
    filters: str = ""
    dtype: torch.dtype = torch.float32
    packed: bool = True
    greedy: float = 0.2  # share of the requests

    def job(self, seed: int, device: str = "cpu") -> Job:
        """Make a job from a seed. Most drafts are likely tokens, a few are placeholders."""
        make = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=make)

        counts = torch.randint(0, self.most + 1, (self.requests,), generator=make)
        ends = (counts + 1).cumsum(0)
        rows, drafted = int(ends[-1]), int(counts.sum())
        logits = (3 * torch.randn(rows, self.vocabulary, generator=make)).to(self.dtype)
        before = torch.ones(rows, dtype=torch.bool)
        before[ends - 1] = False  # rows that verify a draft
        likely = logits.float()[before].argmax(1)
        others = (uniform(drafted) * self.vocabulary).long()
        tokens = torch.where(uniform(drafted) < 0.7, likely, others)
        tokens[uniform(drafted) < 0.03] = -1
        if not self.packed:
            fed = torch.zeros(rows, dtype=torch.int64)
            fed[before.nonzero().flatten() + 1] = tokens
            tokens = fed
        slots = self.requests + 2 if self.proposal == "logits" else self.requests
        temperature = 0.3 + 1.5 * uniform(slots)
        temperature[uniform(slots) < self.greedy] = 0
        choose = dict.fromkeys(self.filters, True)
        top_k = (1 + uniform(slots) * min(self.vocabulary, 40)).int()
        sampling = Sampling(
            temperature,
            torch.randint(-(2**62), 2**62, (slots,), generator=make),
            top_k=top_k.where(uniform(slots) < 0.8, 0) if "k" in choose else None,
            top_p=(0.2 + uniform(slots)).clamp(max=1) if "p" in choose else None,
            min_p=(0.3 * uniform(slots)).where(uniform(slots) < 0.8, 0) if "m" in choose else None,
            slots=torch.randperm(slots, generator=make)[: self.requests] if slots > self.requests else None,
        )
        mixed = 3 * torch.randn(drafted, self.vocabulary, generator=make)
        steps = 3 * torch.randn(slots, self.most, self.vocabulary, generator=make)
        drafts = DraftedTokens(
            tokens.int(),
            ends.int(),
            self.most,
            probs=mixed.softmax(1) if self.proposal == "probs" else None,
            logits=steps.to(self.dtype) if self.proposal == "logits" else None,
        )
        positions = torch.randint(0, 1 << 40, (rows,), generator=make)
        job = Job(logits, drafts, sampling, self.method, positions, self.tile)
        return moved(job, device)


def moved(job: Job, device: str) -> Job:
    def there(one: object) -> object:
        return one.to(device) if isinstance(one, torch.Tensor) else one

    def all_of(one: DraftedTokens | Sampling) -> dict[str, Any]:
        return {name: there(getattr(one, name)) for name in one.__dataclass_fields__}

    return replace(
        job,
        logits=job.logits.to(device),
        drafts=DraftedTokens(**all_of(job.drafts)),
        sampling=Sampling(**all_of(job.sampling)),
        positions=None if job.positions is None else job.positions.to(device),
    )
