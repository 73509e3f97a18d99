"""The definition of `verify`, token by token in double precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from baton.kernels.verify.inputs import Job, Verified
from baton.kernels.verify.randomness import uniforms

Weights = list[float]  # one for each token of the vocabulary


def verify(job: Job) -> Verified:
    tokens = torch.full((job.requests, job.drafts.most + 1), -1, dtype=torch.int32)
    counts = torch.zeros(job.requests, dtype=torch.int32)
    for number in range(job.requests):
        written = _Request.of(job, number).verified()
        tokens[number, : len(written)] = torch.tensor(written, dtype=torch.int32)
        counts[number] = len(written)
    return Verified(tokens, counts)


@dataclass
class _Request:
    """One request of a job, without placeholders and the drafts after them."""

    logits: list[Weights]  # a row for each draft's position, and one for the position after them
    drafts: list[int]
    proposals: list[Weights]  # the distribution from which each draft was drawn
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    random: list[list[float]]  # three per row
    block: bool
    tile: int

    @classmethod
    def of(cls, job: Job, number: int) -> _Request:
        sampling, given = job.sampling, job.drafts
        end = int(given.row_ends[number])
        start = int(given.row_ends[number - 1]) if number else 0
        slot = number if sampling.slots is None else int(sampling.slots[number])
        rows = end - start
        vocabulary = job.logits.shape[1]
        first = start - number if job.packed else start + 1
        drafts = [int(token) for token in given.tokens[first : first + rows - 1]]
        valid = next((i for i, token in enumerate(drafts) if not 0 <= token < vocabulary), len(drafts))
        temperature = float(sampling.temperature[slot])
        if given.probs is not None:
            proposals = given.probs[start - number : start - number + valid].double().tolist()
        elif given.logits is not None and temperature:
            rows_of_slot = given.logits[slot, :valid].double()
            proposals = [_softmax(row, temperature) for row in rows_of_slot.tolist()]
        else:
            proposals = [[float(token == draft) for token in range(vocabulary)] for draft in drafts[:valid]]
        numbers = torch.arange(rows)
        positions = numbers if job.positions is None else job.positions[start:end].cpu()
        return cls(
            logits=[[_number(x) for x in row] for row in job.logits[start:end].double().tolist()],
            drafts=drafts[:valid],
            proposals=proposals,
            temperature=temperature,
            top_k=vocabulary if sampling.top_k is None else int(sampling.top_k[slot]),
            top_p=1.0 if sampling.top_p is None else float(sampling.top_p[slot]),
            min_p=0.0 if sampling.min_p is None else float(sampling.min_p[slot]),
            random=uniforms(sampling.seeds[slot].cpu().expand(rows), positions, numbers).tolist(),
            block=job.method == "block",
            tile=job.tile,
        )

    def verified(self) -> list[int]:
        if self.temperature == 0:
            return self._greedy()
        targets = [self._target(row) for row in self.logits[: len(self.drafts) + 1]]
        accepted, scale = (self._accept_block if self.block else self._accept)(targets)
        weights = targets[accepted]
        if accepted < len(self.drafts):
            weights = _residual(scale, weights, self.proposals[accepted])
        token = self._pick(weights, *self.random[accepted][1:])
        if token is None:  # a rounding error rejected a certain draft: take the most likely token
            token = _first_largest(self.logits[accepted])
        return [*self.drafts[:accepted], token]

    def _greedy(self) -> list[int]:
        written = []
        for row, draft in zip(self.logits, [*self.drafts, None], strict=False):
            written.append(_first_largest(row))
            if written[-1] != draft:
                break
        return written

    def _target(self, row: Weights) -> Weights:
        """Return the distribution to sample from: softmax, filtered by min-p, top-k, top-p in this order."""
        probabilities = _softmax(row, self.temperature)
        # Among equal logits the first in the vocabulary are kept.
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        largest = probabilities[order[0]]
        kept = [token for token in order if probabilities[token] >= self.min_p * largest]
        if self.top_k > 0:
            kept = kept[: self.top_k]
        if self.top_p < 1:
            total = math.fsum(probabilities[token] for token in kept)
            before = [0.0, *accumulate(probabilities[token] for token in kept)]
            kept = [token for token, mass in zip(kept, before, strict=False) if mass < self.top_p * total]
        total = math.fsum(probabilities[token] for token in kept)
        target = [0.0] * len(row)
        for token in kept:
            target[token] = probabilities[token] / total if total else 0.0
        return target

    def _accept(self, targets: list[Weights]) -> tuple[int, float]:
        """Return how many drafts are accepted, and the target's scale in the residual.

        This is algorithm 1 of Leviathan et al.
        """
        for place, draft in enumerate(self.drafts):
            proposed = self.proposals[place][draft]
            if not (proposed > 0 and self.random[place][0] * proposed < targets[place][draft]):
                return place, 1.0
        return len(self.drafts), 1.0

    def _accept_block(self, targets: list[Weights]) -> tuple[int, float]:
        """Return what `_accept` does, by algorithm 2 of Sun et al.: the longest block whose test succeeds."""
        accepted, scale, ratio = 0, 1.0, 1.0
        for place, draft in enumerate(self.drafts):
            proposed = self.proposals[place][draft]
            ratio = min(ratio * targets[place][draft] / proposed, 1.0) if proposed > 0 else 0.0
            chance = ratio
            if place + 1 < len(self.drafts):
                residual = math.fsum(_residual(ratio, targets[place + 1], self.proposals[place + 1]))
                chance = residual / (residual + 1 - ratio) if residual + 1 - ratio > 0 else 1.0
            if self.random[place][0] < chance:
                accepted, scale = place + 1, ratio
        return accepted, scale

    def _pick(self, weights: Weights, for_tile: float, for_token: float) -> int | None:
        """Draw a tile by its weight, then a token within it; None if all weights are 0."""
        tiles = [weights[begin : begin + self.tile] for begin in range(0, len(weights), self.tile)]
        tile = _first_beyond([math.fsum(one) for one in tiles], for_tile)
        if tile is None:
            return None
        token = _first_beyond(tiles[tile], for_token)
        return None if token is None else tile * self.tile + token


def _number(logit: float) -> float:
    return -math.inf if math.isnan(logit) else logit


def _softmax(row: Weights, temperature: float) -> Weights:
    top = max(row)
    weights = [math.exp((logit - top) / temperature) if logit > -math.inf else 0.0 for logit in row]
    total = math.fsum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def _residual(scale: float, target: Weights, proposal: Weights) -> Weights:
    """Return the target's excess over the proposal, per token."""
    return [max(scale * p - q, 0.0) for p, q in zip(target, proposal, strict=True)]


def _first_largest(row: Weights) -> int:
    return max(range(len(row)), key=lambda token: (row[token], -token))


def _first_beyond(weights: Weights, share: float) -> int | None:
    """Return the first place whose cumulative weight exceeds this share of the total (inverse transform)."""
    goal = share * math.fsum(weights)
    for place, (weight, mass) in enumerate(zip(weights, accumulate(weights), strict=True)):
        if weight > 0 and mass > goal:
            return place
    return max((place for place, weight in enumerate(weights) if weight > 0), default=None)
