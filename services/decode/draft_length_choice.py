"""Choose the draft length with the most expected tokens per second, from measured steps.

A draft costs passes of the draft model and verification; its benefit depends on the text. In a small batch
drafts cost almost no time; in a large one every verified token costs time. So no fixed length is good for
both. The length is chosen for the whole batch, every few steps, as argmax_k tokens(k) / seconds(batch, k), 0
included (the goodput of SmartSpec, Liu et al., 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.services.decode.draft_estimates import Acceptance, StepTimeModel, bucket

_REVIEW_STEPS = 4  # steps between choices
_WORTH_A_CHANGE = 1.01  # required gain in tokens per second, so that noise does not flip the choice
# A length measured n times is rated higher by this share / sqrt(n + 1) (an upper confidence bound, Auer et
# al., 2002), so that a length with a few slow steps is measured again. Times vary by 10 to 15 %.
_DOUBT = 0.2
# Other lengths are probed for a few steps at a time, from a budget that every step adds to.
_PROBE_STEPS = 4  # the first of these still verifies drafts of the previous length
_PROBE_SHARE = 0.01  # the part of all time spent on probing
_PROBE_CREDIT_AT_FIRST = 8.0  # steps
_PROBE_CREDIT_NEW_BATCH = 8.0  # steps, for a new batch size
_PROBE_CREDIT_MOST = 3.0
_PROBE_COSTS_AT_LEAST = 0.15  # steps, so that an equally good length is not probed all the time
_PROBE_AGAIN_STEPS = 60  # a length that was run more recently than this needs no probe


@dataclass(frozen=True)
class DraftStep:
    requests: int
    tokens: int  # run through the target: one per request, and the drafts
    limit: int  # draft length of this step; the next step verifies these drafts
    seconds: float | None  # None if the step had prompts, as its time is not comparable
    rows: int = 0  # requests that could have had a draft to verify
    asked: int = 0  # draft length of the previous step
    drafted: Sequence[int] = ()  # [asked or more] rows with a drafted token at each position
    accepted: Sequence[int] = ()  # [asked or more] how many of them were accepted


@dataclass(frozen=True)
class DraftChoice:
    requests: int = 0
    limit: int = 0
    probe: bool = False  # whether the length is run to learn about it, not because it seems best


@dataclass
class _Batch:
    limit: int | None = None
    seen_at: dict[int, int] = field(default_factory=dict)  # draft length -> number of its last step


class DraftLengthChooser:
    """Chooses the draft length of each step. Call it on the engine's thread."""

    def __init__(self, limit: int, *, model_tokens: int | None = None) -> None:
        """Choose at most `limit` tokens.

        model_tokens: tokens of a draft that come from a draft model, each in its own pass; 0 if a method only
        matches text, None for all
        """
        if limit < 1:
            raise ValueError(f"limit is {limit}; it must be at least 1")
        self.limit = limit
        passes = [min(k, limit if model_tokens is None else model_tokens) for k in range(limit + 1)]
        self._acceptance = Acceptance(limit)
        self._times = StepTimeModel(limit, passes)
        self._batches: dict[int, _Batch] = {}
        self.choice = DraftChoice()
        self._credit = _PROBE_CREDIT_AT_FIRST  # steps
        self._step = 0
        self._review_at = 0
        self._probe_ends = 0

    def choose(self, requests: int) -> int:
        """Return the draft length for the step being scheduled. Call once per step."""
        self._step += 1
        last = self.choice
        same = last.requests and bucket(last.requests) == bucket(requests)
        if not same or self._step >= (self._probe_ends if last.probe else self._review_at):
            self.choice = self._decide(requests)
        self._credit = min(self._credit + _PROBE_SHARE, max(self._credit, _PROBE_CREDIT_MOST))
        self._batches[bucket(requests)].seen_at[self.choice.limit] = self._step
        return self.choice.limit

    def observe(self, step: DraftStep) -> None:
        """Learn from a step. Call once per step, in order."""
        if step.rows or step.asked < self.limit:
            self._acceptance.observe(step.rows, step.asked, step.drafted, step.accepted)
        if step.seconds is not None and step.seconds > 0 and step.requests:
            batch = self._batches.get(bucket(step.requests))
            self._times.observe(
                step.requests,
                step.tokens,
                step.limit,
                step.seconds,
                settled=step.asked == step.limit,
                # The last choice may belong to a later step.
                probe=batch is not None and step.limit != batch.limit,
            )

    def _decide(self, requests: int) -> DraftChoice:
        self._times.solve()
        tokens, drafts = self._acceptance.tokens(), self._acceptance.drafts()
        seconds = [
            self._times.seconds(requests, requests * (1.0 + drafts[k]), k) for k in range(self.limit + 1)
        ]
        rates = [brings / takes for brings, takes in zip(tokens, seconds, strict=True)]
        batch = self._batches.get(bucket(requests))
        if batch is None:
            batch = self._batches[bucket(requests)] = _Batch()
            self._credit = max(self._credit, _PROBE_CREDIT_NEW_BATCH)
        hopes = [
            rate * (1.0 + _DOUBT / math.sqrt(self._times.samples(requests, k) + 1.0))
            for k, rate in enumerate(rates)
        ]
        best = max(range(self.limit + 1), key=hopes.__getitem__)
        if batch.limit is None or hopes[best] > hopes[batch.limit] * _WORTH_A_CHANGE:
            batch.limit = best
        probe = None if self.choice.probe else self._worth_a_look(batch, batch.limit, rates)
        if probe is not None:
            self._probe_ends = self._step + _PROBE_STEPS
        self._review_at = self._step + _REVIEW_STEPS
        limit = batch.limit if probe is None else probe
        return DraftChoice(requests, limit, probe is not None)

    def _worth_a_look(self, batch: _Batch, limit: int, rates: Sequence[float]) -> int | None:
        """Return a length to probe, long unseen or cheap to run; None if none is worth the time."""
        best, most = None, 0.0
        for other, rate in enumerate(rates):
            age = self._step - batch.seen_at.get(other, -4 * _PROBE_AGAIN_STEPS)
            cost = _PROBE_STEPS * max(_PROBE_COSTS_AT_LEAST, 1.0 - rate / rates[limit])
            if other == limit or age < _PROBE_AGAIN_STEPS or cost > self._credit:
                continue
            if age / cost > most:
                best, most, price = other, age / cost, cost
        if best is not None:
            self._credit -= price
        return best
