"""Choose the workers for a request.

1. If the prompt is shorter than `handoff_min_tokens`, it is not handed over: a decode or mixed worker runs
   the whole request. So does a decode worker that has to compute fewer than that many tokens of a longer
   prompt.
2. Otherwise a pair of a prefill and a decode worker is chosen, if both have room.
3. An idle decode worker runs the whole request if its queue is shorter than the prefill worker's
   (`booking.may_help`): at the start of a burst decode workers have nothing else to do.
4. If no pair has room, a mixed worker runs the whole request.
5. If one side has no worker for this request (none is ready, or all have failed it), the other side runs the
   whole request. It does not stand in for full workers: long prompts in decode batches would lengthen every
   inter-token latency, and decoding on prefill workers every time to first token.

Only encodes of images go to encode workers.

If nothing is possible, the most hopeful rejection is returned: FULL before TOO_LARGE before NO_WORKERS.

If the picker needs only a few candidates, workers are drawn at random until enough have passed the filters,
in addition to those that hold most of the prompt. All workers are filtered only if that finds none.

A pair may come with a source: a worker that holds so much more of the prompt than the prefill worker that
pulling it is faster than computing it.
"""

# mypy: disable-error-code="type-abstract"

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Source, may_help, waits_for_slot
from baton.scheduler.need import Need
from baton.scheduler.policy.base import Filter, PairFilter, Picker, Scorer, Side
from baton.scheduler.policy.parts import prompt_speed
from baton.scheduler.policy.registry import load
from baton.scheduler.types import FleetView, PlacementLimits, PolicyOptions, WorkerRecord

LOOKS = 32  # workers drawn at random before all are filtered
HOLDERS = 2  # workers that hold most of the prompt, per role and length of match

Holders = Sequence[WorkerRecord]

_HOPE = {pb.Rejection.CODE_NO_WORKERS: 0, pb.Rejection.CODE_TOO_LARGE: 1, pb.Rejection.CODE_FULL: 2}
_WORK = {Side.PREFILL: "prefill", Side.DECODE: "decode", Side.BOTH: "take the request"}
_GENERATING = (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED)


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    prefill: WorkerRecord | None  # None: the decode worker also prefills
    decode: WorkerRecord  # an encode worker if an image is placed
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class NoChoice:
    """The reason why no worker can take the request."""

    code: pb.Rejection.Code
    message: str
    nobody: bool = False  # no worker of the role is registered

    def hope(self) -> int:
        """Return how likely a retry is to succeed; higher is likelier."""
        return -1 if self.nobody else _HOPE.get(self.code, 0)


@dataclass(frozen=True, slots=True)
class _Kept:
    workers: list[WorkerRecord]
    why: NoChoice | None
    drawn_from: Sequence[WorkerRecord] = ()  # empty if `workers` are all that passed

    @property
    def lost(self) -> bool:
        """Whether there is no worker for this request, not even a full one."""
        return self.why is not None and self.why.code == pb.Rejection.CODE_NO_WORKERS


class Policy:
    """Combine filters, scorers and a picker. Not shared between threads."""

    def __init__(
        self, limits: PlacementLimits, options: PolicyOptions, rng: random.Random | None = None
    ) -> None:
        """Load the parts that `options` name. Raises BadPolicy."""
        self._limits = limits
        self._filters = [load(name, Filter)(limits) for name in options.filters]
        self._pair_filters = [load(name, PairFilter)(limits) for name in options.pair_filters]
        scorers = [(load(name, Scorer)(limits), weight) for name, weight in options.scorers.items()]
        self._scorers = {
            side: [(one, weight) for one, weight in scorers if one.side & side]
            for side in (Side.PREFILL, Side.DECODE, Side.BOTH)
        }
        self._picker = load(options.picker, Picker)(limits)
        self._rng = rng or random.Random()  # noqa: S311 (no secret)

    def choose(self, view: FleetView, need: Need) -> WorkerChoice | NoChoice:
        """Return the workers for `need`, or the reason why there are none. Has no side effects."""
        if need.encode:
            encoders = view.of(pb.ROLE_ENCODE)
            return self._single(encoders, need, self._holders(view, need, pb.ROLE_ENCODE), Side.PREFILL)
        if need.prompt_tokens < self._limits.handoff_min_tokens:
            return self._choose_one(view, need)
        held = self._holders(view, need, *_GENERATING)
        choice = self._choose(view, need, held)
        if isinstance(choice, WorkerChoice) and choice.prefill:
            source = self._source(choice.prefill, [choice.decode, *held], need)
            return replace(choice, source=source) if source else choice
        return choice

    def _choose_one(self, view: FleetView, need: Need) -> WorkerChoice | NoChoice:
        choice = self._single(view.of(pb.ROLE_DECODE, pb.ROLE_MIXED), need)
        if isinstance(choice, NoChoice) and self._keep(view.of(pb.ROLE_DECODE), need, Side.DECODE).lost:
            choice = self._or_else(choice, view.of(pb.ROLE_PREFILL), need, ())
        return choice

    def _choose(self, view: FleetView, need: Need, held: Holders) -> WorkerChoice | NoChoice:
        prefill, decode, mixed = (view.of(role) for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED))
        fewest = self._limits.handoff_min_tokens
        decodes = self._keep(decode, need, Side.DECODE, held)
        if near := [one for one in decodes.workers if need.tokens_for(one.worker_id) < fewest]:
            choice = self._single(near, need)
            if isinstance(choice, WorkerChoice):
                return choice
        prefills = self._keep(prefill, need, Side.PREFILL, held)
        choice = self._single(decode, need, held) if prefills.lost else self._pair(prefills, decodes, need)
        if isinstance(choice, WorkerChoice) and choice.prefill:
            choice = self._helped(choice, choice.prefill, decode, need)
        if isinstance(choice, NoChoice):
            choice = self._or_else(choice, mixed, need, held)
        if isinstance(choice, NoChoice) and decodes.lost:
            choice = self._or_else(choice, prefill, need, held)
        return choice

    def _or_else(
        self, refusal: NoChoice, workers: Sequence[WorkerRecord], need: Need, held: Holders
    ) -> WorkerChoice | NoChoice:
        choice = self._single(workers, need, held)
        return choice if isinstance(choice, WorkerChoice) else max(refusal, choice, key=NoChoice.hope)

    def _single(
        self, workers: Sequence[WorkerRecord], need: Need, held: Holders = (), side: Side = Side.BOTH
    ) -> WorkerChoice | NoChoice:
        kept = self._keep(workers, need, side, held)
        return kept.why or WorkerChoice(None, self._pick(kept.workers, need, side))

    def _helped(
        self, choice: WorkerChoice, prefill: WorkerRecord, decode: Sequence[WorkerRecord], need: Need
    ) -> WorkerChoice:
        queued = prefill.reserved.prompt_tokens
        if not queued:
            return choice

        # A cheap test before `may_help`: at least one token of the prompt must be computed.
        computes = need.prompt_tokens if need.match is None else 1
        longest = min(queued - 1, self._limits.idle_decode_tokens - computes)
        helpers = [
            one
            for one in self._drawn(decode)
            if one.reserved.prompt_tokens <= longest
            and may_help(need, one, queued, self._limits)
            and self._passes(one, need, Side.BOTH)
        ]
        return WorkerChoice(None, self._pick(helpers, need, Side.BOTH)) if helpers else choice

    def _pair(self, prefills: _Kept, decodes: _Kept, need: Need) -> WorkerChoice | NoChoice:
        failures = [side.why for side in (decodes, prefills) if side.why]
        if failures:
            return min(failures, key=NoChoice.hope)
        found = self._partners(prefills.workers, decodes.workers, need)
        if found is None and (prefills.drawn_from or decodes.drawn_from):
            # No two of the drawn workers are compatible, but others may be.
            prefills = self._all(prefills.drawn_from or prefills.workers, need, Side.PREFILL)
            decodes = self._all(decodes.drawn_from or decodes.workers, need, Side.DECODE)
            found = self._partners(prefills.workers, decodes.workers, need)
        if found is not None:
            return found
        return NoChoice(pb.Rejection.CODE_NO_WORKERS, self._explain(prefills.workers[0], decodes.workers[0]))

    def _partners(
        self, prefills: Sequence[WorkerRecord], decodes: Sequence[WorkerRecord], need: Need
    ) -> WorkerChoice | None:
        left = list(decodes)
        while left:
            decode = self._pick(left, need, Side.DECODE)
            partners = [prefill for prefill in prefills if self._compatible(prefill, decode)]
            if partners:
                return WorkerChoice(self._pick(partners, need, Side.PREFILL), decode)
            left = [worker for worker in left if worker is not decode]
        return None

    def _source(self, prefill: WorkerRecord, holders: Holders, need: Need) -> Source | None:
        """Return the worker from which `prefill` can pull most of its missing blocks, if that is worth it.

        The source needs a free slot, or the prompt would wait for it.
        """
        fewest = self._limits.prefix_pull_s * prompt_speed(prefill)
        lacks = need.tokens_for(prefill.worker_id)
        if not fewest or need.match is None or lacks <= fewest:
            return None
        best = None
        for worker in holders:
            left = need.tokens_for(worker.worker_id)
            if (
                left <= lacks - fewest
                and (best is None or left < need.tokens_for(best.worker_id))
                and not waits_for_slot(worker)
                and self._passes(worker, need, Side.NONE)
                and self._compatible(worker, prefill)
            ):
                best = worker
        return Source(best, need.prompt_tokens - need.tokens_for(best.worker_id)) if best else None

    def _holders(self, view: FleetView, need: Need, *roles: pb.Role) -> Holders:
        if need.match is None:
            return ()
        best = (need.match.best(role, HOLDERS, self._rng) for role in roles)
        return [worker for ids in best for one in ids if (worker := view.workers.get(one)) is not None]

    def _keep(self, workers: Sequence[WorkerRecord], need: Need, side: Side, held: Holders = ()) -> _Kept:
        wanted = self._picker.draws
        if not wanted or len(workers) <= wanted:
            return self._all(workers, need, side)
        roles = {workers[0].role, workers[-1].role}
        found = {one.worker_id: one for one in held if one.role in roles and self._passes(one, need, side)}
        wanted += len(found)
        for worker in self._drawn(workers):
            if worker.worker_id not in found and self._passes(worker, need, side):
                found[worker.worker_id] = worker
                if len(found) == wanted:
                    break
        if found:
            return _Kept(list(found.values()), None, workers)
        # Nearly all are full. Draw again, or several schedulers would all choose the best free worker.
        kept = self._all(workers, need, side)
        if len(kept.workers) <= wanted:
            return kept
        return _Kept(self._rng.sample(kept.workers, wanted), None, workers)

    def _drawn(self, workers: Sequence[WorkerRecord]) -> Iterator[WorkerRecord]:
        left, random_ = list(workers), self._rng.random
        for size in range(len(left), max(0, len(left) - LOOKS), -1):
            at = int(random_() * size)
            yield left[at]
            left[at] = left[size - 1]

    def _passes(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        for one in self._filters:  # noqa: SIM110 (a generator would cost as much as a filter)
            if not one.keeps(worker, need, side):
                return False
        return True

    def _all(self, workers: Iterable[WorkerRecord], need: Need, side: Side) -> _Kept:
        left = list(workers)
        if not left:
            message = f"no worker to {_work(need, side)} is registered"
            return _Kept([], NoChoice(pb.Rejection.CODE_NO_WORKERS, message, nobody=True))
        for one in self._filters:
            before, left = left, [worker for worker in left if one.keeps(worker, need, side)]
            if not left:
                why = one.why(before, need, side)
                return _Kept([], NoChoice(one.code, f"no worker can {_work(need, side)}: {why}"))
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
        asked = self._scorers[side]
        total = sum(weight for _, weight in asked) or 1.0
        scored = []
        for worker in workers:
            score = 0.0
            for scorer, weight in asked:
                score += scorer.score(worker, need) * weight
            scored.append((worker, score / total))
        return self._picker.pick(scored, self._rng)


def _work(need: Need, side: Side) -> str:
    return "encode" if need.encode else _WORK[side]
