"""The choice of workers for a request, and what is preferred when several ways are open.

1. A pair of a prefill and a decode worker, where both have room.
2. Otherwise a mixed worker alone: where pairs and mixed workers share a topic, the mixed ones take the
   overflow.
3. A decode worker prefills itself where the prompt is shorter than `handoff_min_tokens`: then it and the
   mixed workers are equals, and no pair is formed.
4. A decode worker that runs nothing prefills, too, while its own queue is the shorter one and bounded
   (`booking.may_help`): at the beginning of a burst it would stand idle beside prefill workers that queue.
5. One side does it all where the other one is lost to this request (none ready, or all of them failed it).
   Full workers are not covered for: long prompts in the decode batches would lengthen every inter-token
   latency to hide a lack of prefill workers, and decoding on prefill workers every time to first token.

When no way is open, the rejection is the most hopeful one: FULL before TOO_LARGE before NO_WORKERS.
"""

# mypy: disable-error-code="type-abstract"

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import may_help
from baton.scheduler.policy.base import Filter, PairFilter, Picker, Scorer, Side
from baton.scheduler.policy.registry import load
from baton.scheduler.types import FleetView, Need, PlacementLimits, PolicyOptions, WorkerRecord

_HOPE = {pb.Rejection.CODE_NO_WORKERS: 0, pb.Rejection.CODE_TOO_LARGE: 1, pb.Rejection.CODE_FULL: 2}
_WORK = {Side.PREFILL: "prefill", Side.DECODE: "decode", Side.BOTH: "take the request"}


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """The workers chosen; `prefill` is None where `decode` does it all."""

    prefill: WorkerRecord | None
    decode: WorkerRecord


@dataclass(frozen=True, slots=True)
class NoChoice:
    """The reason why no worker can take the request."""

    code: pb.Rejection.Code
    message: str
    nobody: bool = False  # there is not even a worker that others could be compared with

    def hope(self) -> int:
        """Return how soon the reason may be gone; higher is sooner."""
        return -1 if self.nobody else _HOPE.get(self.code, 0)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The workers that the filters left, or else why they left none."""

    workers: list[WorkerRecord]
    why: NoChoice | None

    @property
    def lost(self) -> bool:
        """Whether there is no worker to do it, busy or not."""
        return self.why is not None and self.why.code == pb.Rejection.CODE_NO_WORKERS


class Policy:
    """Filters, scorers and a picker, put together. Not shared between threads."""

    def __init__(
        self, limits: PlacementLimits, options: PolicyOptions, rng: random.Random | None = None
    ) -> None:
        """Load the parts that `options` name; the picker draws from `rng`. Raises BadPolicy."""
        self._limits = limits
        self._filters = [load(name, Filter)(limits) for name in options.filters]
        self._pair_filters = [load(name, PairFilter)(limits) for name in options.pair_filters]
        self._scorers = [(load(name, Scorer)(limits), weight) for name, weight in options.scorers.items()]
        self._picker = load(options.picker, Picker)(limits)
        self._rng = rng or random.Random()  # noqa: S311 (no secret)

    def choose(self, view: FleetView, need: Need) -> WorkerChoice | NoChoice:
        """Return the workers that shall take `need`, or why none can. Changes nothing."""
        prefill = [worker for worker in view.workers.values() if worker.role == pb.ROLE_PREFILL]
        decode = [worker for worker in view.workers.values() if worker.role == pb.ROLE_DECODE]
        mixed = [worker for worker in view.workers.values() if worker.role == pb.ROLE_MIXED]
        if need.prompt_tokens < self._limits.handoff_min_tokens:
            return self._alone([*decode, *mixed], need)
        prefills, decodes = self._keep(prefill, need, Side.PREFILL), self._keep(decode, need, Side.DECODE)
        choice = self._alone(decode, need) if prefills.lost else self._pair(prefills, decodes, need)
        if isinstance(choice, WorkerChoice) and choice.prefill:
            choice = self._helped(choice, choice.prefill.reserved.prompt_tokens, decodes, need)
        if isinstance(choice, NoChoice):
            choice = self._or_else(choice, mixed, need)
        if isinstance(choice, NoChoice) and decodes.lost:
            choice = self._or_else(choice, prefill, need)
        return choice

    def _or_else(
        self, refusal: NoChoice, workers: Iterable[WorkerRecord], need: Need
    ) -> WorkerChoice | NoChoice:
        choice = self._alone(workers, need)
        return choice if isinstance(choice, WorkerChoice) else max(refusal, choice, key=NoChoice.hope)

    def _alone(self, workers: Iterable[WorkerRecord], need: Need) -> WorkerChoice | NoChoice:
        kept = self._keep(workers, need, Side.BOTH)
        return kept.why or WorkerChoice(None, self._pick(kept.workers, need, Side.BOTH))

    def _helped(self, choice: WorkerChoice, queued: int, decodes: _Kept, need: Need) -> WorkerChoice:
        """Return an idle decode worker alone, if its queue is below `queued` prompt tokens, else `choice`."""
        limits = self._limits
        idle = [one for one in decodes.workers if may_help(need, one, queued, limits)] if queued else []
        alone = self._alone(idle, need)
        return alone if isinstance(alone, WorkerChoice) else choice

    def _pair(self, prefills: _Kept, decodes: _Kept, need: Need) -> WorkerChoice | NoChoice:
        failures = [side.why for side in (decodes, prefills) if side.why]
        if failures:
            return min(failures, key=NoChoice.hope)  # both sides are needed
        left = decodes.workers
        while left:
            decode = self._pick(left, need, Side.DECODE)
            partners = [prefill for prefill in prefills.workers if self._compatible(prefill, decode)]
            if partners:
                return WorkerChoice(self._pick(partners, need, Side.PREFILL), decode)
            left = [worker for worker in left if worker is not decode]
        return NoChoice(pb.Rejection.CODE_NO_WORKERS, self._explain(prefills.workers[0], decodes.workers[0]))

    def _keep(self, workers: Iterable[WorkerRecord], need: Need, side: Side) -> _Kept:
        left = list(workers)
        if not left:
            message = f"no worker to {_WORK[side]} is registered"
            return _Kept([], NoChoice(pb.Rejection.CODE_NO_WORKERS, message, nobody=True))
        for one in self._filters:
            before, left = left, [worker for worker in left if one.keeps(worker, need, side)]
            if not left:
                why = one.why(before, need, side)
                return _Kept([], NoChoice(one.code, f"no worker can {_WORK[side]}: {why}"))
        return _Kept(left, None)

    def _compatible(self, prefill: WorkerRecord, decode: WorkerRecord) -> bool:
        return all(one.keeps(prefill, decode) for one in self._pair_filters)

    def _explain(self, prefill: WorkerRecord, decode: WorkerRecord) -> str:
        return next(
            one.explain(prefill, decode) for one in self._pair_filters if not one.keeps(prefill, decode)
        )

    def _pick(self, workers: Sequence[WorkerRecord], need: Need, side: Side) -> WorkerRecord:
        if len(workers) == 1:
            return workers[0]
        asked = [(scorer, weight) for scorer, weight in self._scorers if scorer.side & side]
        total = sum(weight for _, weight in asked) or 1.0
        scored = [
            (worker, sum(scorer.score(worker, need) * weight for scorer, weight in asked) / total)
            for worker in workers
        ]
        return self._picker.pick(scored, self._rng)
