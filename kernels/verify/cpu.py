"""The CPU form of `verify`: all requests at once, in PyTorch.

It stores probabilities only for the row from which a request's last token is drawn. For the other rows it
computes the needed figures, a few rows at a time so that they stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.kernels.verify import cpu_cut
from baton.kernels.verify.inputs import Job, Verified
from baton.kernels.verify.randomness import uniforms

_AT_ONCE = 1 << 19  # logits whose exponentials are summed at once: 2 MiB


def verify(job: Job) -> Verified:
    batch = _Batch.of(job)
    place = torch.zeros(batch.requests, dtype=torch.int64)
    token = torch.zeros_like(place)
    greedy = batch.temperature == 0
    if bool(greedy.any()):
        which = greedy.nonzero().flatten()
        place[which], token[which] = _greedy(job, batch.of_requests(which))
    if not bool(greedy.all()):
        which = (~greedy).nonzero().flatten()
        place[which], token[which] = _sampled(job, batch.of_requests(which))
    order = torch.arange(job.drafts.most + 1)
    padded = torch.cat([batch.drafts, batch.drafts.new_full((batch.requests, 1), -1)], 1)
    place = place.unsqueeze(1)
    tokens = torch.where(order < place, padded, -1).scatter_(1, place, token.unsqueeze(1))
    return Verified(tokens.int(), (place.squeeze(1) + 1).int())


@dataclass(frozen=True)
class _Batch:
    """R requests with K places for drafts each."""

    starts: torch.Tensor  # [R]: first row of logits
    drafts: torch.Tensor  # [R, K] int64: -1 from the first placeholder on
    drafted: torch.Tensor  # [R]: number of drafts before the first placeholder
    numbers: torch.Tensor  # [R]: the requests' numbers in the job
    slots: torch.Tensor  # [R]
    temperature: torch.Tensor  # [R]

    @classmethod
    def of(cls, job: Job) -> _Batch:
        given, most = job.drafts, job.drafts.most
        ends = given.row_ends.long()
        starts = ends - ends.diff(prepend=ends.new_zeros(1))
        numbers = torch.arange(job.requests)
        first = starts - numbers if job.packed else starts + 1
        places = torch.arange(most)
        inside = places < (ends - starts - 1).unsqueeze(1)
        if given.tokens.shape[0] and most:
            index = torch.where(inside, first.unsqueeze(1) + places, 0)
            tokens = torch.where(inside, given.tokens[index].long(), -1)
        else:
            tokens = torch.full((job.requests, most), -1)
        valid = ((tokens >= 0) & (tokens < job.logits.shape[1])).cumprod(1).bool()
        slots = numbers if job.sampling.slots is None else job.sampling.slots.long()
        temperature = job.sampling.temperature[slots]
        return cls(starts, torch.where(valid, tokens, -1), valid.sum(1), numbers, slots, temperature)

    @property
    def requests(self) -> int:
        return int(self.starts.shape[0])

    def of_requests(self, which: torch.Tensor) -> _Batch:
        if which.shape[0] == self.requests:
            return self
        return _Batch(*(getattr(self, name)[which] for name in self.__dataclass_fields__))

    def rows(self) -> torch.Tensor:
        """Return [R, K + 1] row numbers of logits, with a request's last row repeated as padding."""
        places = torch.arange(self.drafts.shape[1] + 1).expand(self.requests, -1)
        return self.starts.unsqueeze(1) + places.minimum(self.drafted.unsqueeze(1))


def _greedy(job: Job, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of each request's last token, and that token."""
    logits = job.logits if batch.requests == job.requests else job.logits[batch.rows().flatten()]
    best = _best(logits)
    best = best[batch.rows()] if batch.requests == job.requests else best.view(batch.requests, -1)
    place = (best[:, :-1] == batch.drafts).cumprod(1).sum(1)
    return place, best.gather(1, place.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class _Targets:
    """The target distributions of some requests. Row r * (K + 1) + j of M is place j of request r."""

    job: Job
    rows: torch.Tensor  # [M]
    inverse: torch.Tensor  # [M] 1 / temperature
    top: torch.Tensor  # [M] largest scaled logit
    cuts: cpu_cut.Cuts

    @classmethod
    def of(cls, job: Job, batch: _Batch) -> _Targets:
        rows = batch.rows()
        width = rows.shape[1]
        rows = rows.flatten()
        inverse = (1 / batch.temperature).repeat_interleave(width)
        vocabulary = job.logits.shape[1]
        top, mass = torch.empty_like(inverse), torch.empty_like(inverse)
        for some in torch.arange(rows.shape[0]).split(max(1, _AT_ONCE // vocabulary)):
            scaled = _clean(job.logits[rows[some]]).mul_(inverse[some].unsqueeze(1))
            top[some] = scaled.amax(1).clamp(min=torch.finfo(torch.float32).min)
            mass[some] = scaled.sub_(top[some].unsqueeze(1)).exp_().sum(1)
        if not job.filtered:
            return cls(job, rows, inverse, top, cpu_cut.Cuts.none(mass, vocabulary))
        filters = _filters(job, batch.slots.repeat_interleave(width))
        return cls(job, rows, inverse, top, cpu_cut.find(_clean(job.logits[rows]), inverse, mass, filters))

    def weights(self, which: torch.Tensor) -> torch.Tensor:
        """Return [m, V]: exp(scaled logit - top) of these rows, and 0 for tokens that are filtered out."""
        logits = _clean(self.job.logits[self.rows[which]])
        kept = None
        if self.job.filtered:
            kept = self.cuts.kept(which, logits, torch.arange(logits.shape[1]))
        weights = logits.mul_(self.inverse[which].unsqueeze(1)).sub_(self.top[which].unsqueeze(1)).exp_()
        return weights if kept is None else weights.mul_(kept)

    def chances(self, drafts: torch.Tensor) -> torch.Tensor:
        """Return [R, K]: the probability of each draft; arbitrary where there is no draft."""
        requests, most = drafts.shape
        which = torch.arange(self.rows.shape[0]).view(requests, most + 1)[:, :-1]
        tokens = drafts.clamp(min=0)
        logits = self.job.logits[self.rows[which], tokens].float()
        logits = torch.where(logits.isnan(), float("-inf"), logits)
        weights = (logits * self.inverse[which] - self.top[which]).exp()
        if self.job.filtered:
            flat = which.flatten()
            kept = self.cuts.kept(flat, logits.reshape(-1, 1), tokens.reshape(-1, 1))
            weights = weights * kept.view_as(weights)
        return weights / self.cuts.mass[which]


def _clean(logits: torch.Tensor) -> torch.Tensor:
    """Return a float32 copy in which nan is -inf."""
    copied = logits.to(torch.float32, copy=True)
    if bool(copied.amax(-1).isnan().any()):  # takes a tenth as long as checking every logit
        copied.masked_fill_(copied.isnan(), float("-inf"))
    return copied


def _best(logits: torch.Tensor) -> torch.Tensor:
    """Return [M]: the place of each row's largest logit, the first if several are equal.

    For 512,000 float32 logits on one core NumPy takes 23 us and PyTorch 271 us (1,634 us for bfloat16).
    """
    rows = logits.float()
    best = torch.from_numpy(rows.numpy().argmax(1))
    if bool(rows.gather(1, best.unsqueeze(1)).isnan().any()):  # argmax prefers nan
        return torch.from_numpy(_clean(rows).numpy().argmax(1))
    return best


def _filters(job: Job, slots: torch.Tensor) -> cpu_cut.Filters:
    sampling, vocabulary = job.sampling, job.logits.shape[1]
    every = torch.full_like(slots, vocabulary)
    top_k = every if sampling.top_k is None else sampling.top_k[slots].long()
    top_p = torch.ones(slots.shape[0]) if sampling.top_p is None else sampling.top_p[slots].float()
    min_p = torch.zeros(slots.shape[0]) if sampling.min_p is None else sampling.min_p[slots].float()
    return cpu_cut.Filters(torch.where((top_k <= 0) | (top_k > vocabulary), every, top_k), top_p, min_p)


class _Proposals:
    """The distributions from which the drafts of some requests were drawn; one-hot by default."""

    def __init__(self, job: Job, batch: _Batch) -> None:
        self._job, self._batch = job, batch
        self.one_hot = job.drafts.probs is None and job.drafts.logits is None

    def at(self, which: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return [m, V]: the distributions of these requests' drafts at these places."""
        given, batch = self._job.drafts, self._batch
        if given.probs is not None:
            return given.probs[(batch.starts - batch.numbers)[which] + places]
        if given.logits is None:
            raise ValueError("a one-hot proposal is not written out")
        logits = _clean(given.logits[batch.slots[which], places])
        return logits.div_(batch.temperature[which].unsqueeze(1)).softmax(1)

    def chances(self) -> torch.Tensor:
        """Return [R, K]: the probability of each draft, 0 where there is no draft."""
        drafts = self._batch.drafts
        chances = torch.ones(drafts.shape)
        for place in range(0 if self.one_hot else drafts.shape[1]):
            which = (self._batch.drafted > place).nonzero().flatten()
            found = self.at(which, torch.full_like(which, place)).gather(1, drafts[which, place, None])
            chances[which, place] = found.squeeze(1)
        return chances * (drafts >= 0)


def _sampled(job: Job, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of each request's last token, and that token."""
    targets, proposals = _Targets.of(job, batch), _Proposals(job, batch)
    width = batch.drafts.shape[1] + 1
    numbers = torch.arange(width).expand(batch.requests, width)
    positions = numbers if job.positions is None else job.positions[batch.rows()]
    random = uniforms(job.sampling.seeds[batch.slots].unsqueeze(1).expand(-1, width), positions, numbers)
    accept = _accept_block if job.method == "block" else _accept
    place, scale = accept(batch, targets, proposals, random[..., 0])
    which = torch.arange(batch.requests) * width + place
    weights = targets.weights(which)
    rejected = (place < batch.drafted).nonzero().flatten()
    if rejected.numel():
        if proposals.one_hot:
            weights[rejected, batch.drafts[rejected, place[rejected]]] = 0
        else:
            share = scale[rejected] / targets.cuts.mass[which[rejected]]
            target = weights[rejected] * share.unsqueeze(1)
            weights[rejected] = (target - proposals.at(rejected, place[rejected])).clamp_(min=0)
    chosen = random[torch.arange(batch.requests), place]
    token = _pick(weights, chosen[:, 1], chosen[:, 2], job.tile)
    # A rounding error may reject a draft that has all the probability: then take the most likely token.
    if bool((token < 0).any()):
        best = _best(job.logits[targets.rows[which]])
        token = torch.where(token < 0, best, token)
    return place, token


def _accept(
    batch: _Batch, targets: _Targets, proposals: _Proposals, random: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many drafts of each request are accepted, and the target's scale in the residual."""
    proposed = proposals.chances()
    accepted = (proposed > 0) & (random[:, :-1] * proposed < targets.chances(batch.drafts))
    return accepted.cumprod(1).sum(1), torch.ones(batch.requests)


def _accept_block(
    batch: _Batch, targets: _Targets, proposals: _Proposals, random: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    proposed, wanted = proposals.chances(), targets.chances(batch.drafts)
    ratio, scale = torch.ones(batch.requests), torch.ones(batch.requests)
    accepted = torch.zeros(batch.requests, dtype=torch.int64)
    for place in range(batch.drafts.shape[1]):
        exists = proposed[:, place] > 0
        ratio = torch.where(exists, (ratio * wanted[:, place] / proposed[:, place]).clamp(max=1), 0.0)
        chance = ratio.clone()
        which = (batch.drafted > place + 1).nonzero().flatten()
        if which.numel():
            some = ratio[which]
            residual = _residual_mass(
                which, place + 1, some, wanted=wanted, targets=targets, proposals=proposals
            )
            below = residual + 1 - some
            chance[which] = torch.where(below > 0, residual / below, 1.0)
        better = (batch.drafted > place) & (random[:, place] < chance)
        accepted, scale = torch.where(better, place + 1, accepted), torch.where(better, ratio, scale)
    return accepted, scale


def _residual_mass(
    which: torch.Tensor,
    place: int,
    ratio: torch.Tensor,
    *,
    wanted: torch.Tensor,
    targets: _Targets,
    proposals: _Proposals,
) -> torch.Tensor:
    """Return [m]: the sum of max(ratio * target - proposal, 0) of these requests at this place."""
    if proposals.one_hot:
        return ratio * (1 - wanted[which, place])
    rows = which * (wanted.shape[1] + 1) + place
    share = (ratio / targets.cuts.mass[rows]).unsqueeze(1)
    proposal = proposals.at(which, torch.full_like(which, place))
    return (targets.weights(rows).mul_(share) - proposal).clamp_(min=0).sum(1)


def _pick(weights: torch.Tensor, for_tile: torch.Tensor, for_token: torch.Tensor, size: int) -> torch.Tensor:
    """Draw [R] tokens by weights [R, V], first a tile, then a token in it; -1 if all weights are 0."""
    requests, vocabulary = weights.shape
    size = min(size, vocabulary)
    padded = torch.nn.functional.pad(weights, (0, -vocabulary % size)).view(requests, -1, size)
    tile = _first_beyond(padded.sum(2), for_tile)
    token = _first_beyond(padded[torch.arange(requests), tile.clamp(min=0)], for_token)
    return torch.where((tile < 0) | (token < 0), -1, tile * size + token)


def _first_beyond(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return [R]: the first place of [R, n] whose cumulative weight exceeds this share; -1 if all are 0."""
    mass = weights.double().cumsum(1)
    some = weights > 0
    beyond = some & (mass > share.unsqueeze(1) * mass[:, -1:])
    last = weights.shape[1] - 1 - some.flip(1).int().argmax(1)
    found = torch.where(beyond.any(1), beyond.int().argmax(1), last)
    return torch.where(some.any(1), found, -1)
