"""The outcome of a plan: its figures, and whether they are good enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.protos import scheduler_pb2 as pb
from baton.services.classes import ClassesSettings
from harness.chaos.load import Answer, Fate, judge
from harness.stats import percentile

KEPT = 20  # messages kept of each kind
ADDED_S = 2.0  # a pause may take a lease and this
TURN_S = ClassesSettings().batch.patience_s  # of batch work whose prompt is computed again, behind others

Span = tuple[float, float]  # from, to; time.monotonic, seconds


@dataclass
class Leaks:
    """Resources that are still held and should not be."""

    blocks: int = 0  # of the KV caches, not free again
    attempts: int = 0  # live at the scheduler
    reservations: int = 0
    pinned: int = 0  # handoffs
    pinned_bytes: int = 0
    running: int = 0  # requests in engines
    segments: int = 0  # files of shared memory, after the end

    @property
    def leases(self) -> int:
        return self.attempts + self.reservations + self.pinned

    @property
    def any(self) -> bool:
        return any(asdict(self).values())


def leaks(told: pb.Description) -> Leaks:
    """Return what an idle deployment would not hold. Cached blocks count as free."""
    found = Leaks(attempts=len(told.attempts))
    for one in told.workers:
        usable = one.identity.capacity.num_blocks - 1  # the engine keeps one as a null
        found.blocks += usable - one.load.free_blocks
        found.reservations += one.reserved_requests
        found.pinned += one.load.pinned_handoffs
        found.pinned_bytes += one.load.pinned_bytes
        found.running += one.load.running + one.load.waiting
    return found


@dataclass
class Outcome:
    """The figures of one run of a plan. Times are in seconds."""

    plan: str
    seed: int
    shape: str
    speculation: str
    store: str
    began_at: float = 0.0  # time.monotonic
    seconds: float = 0.0
    requests: int = 0
    streams: int = 0
    tokens: int = 0
    failed: int = 0
    wrong: int = 0
    refused: int = 0  # 503 before any byte, while nobody could serve: sent again
    refused_needlessly: int = 0  # the same while a worker could: these count as failed
    router_lost: int = 0  # requests of a router that was killed
    longest_pause_s: float = 0.0
    longest_pause_of: str = ""
    longest_covered_pause_s: float = 0.0  # without the time in which no worker was left, or its router hung
    pause_limit_s: float = 0.0  # a lease and ADDED_S; a lease more for each further fault in a pause; 0: none
    full: bool = False  # requests wait for slots: what comes before the first token is no pause
    over_limit: int = 0  # pauses, of the covered ones
    p50_pause_s: float = 0.0  # of the answers' longest ones
    p99_pause_s: float = 0.0
    leaks: Leaks = field(default_factory=Leaks)
    clean_after_s: float = 0.0  # after the last answer
    restarts: int = 0
    crashes: list[str] = field(default_factory=list)
    unhealed: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)  # requests that were hit, by role and stage
    retries: dict[str, int] = field(default_factory=dict)  # attempts that failed, by trouble
    recomputed: int = 0  # prompts that were prefilled once more, by their decode worker
    most_booked: int = 0  # requests at one decode worker at a time
    poison: dict[str, int] = field(default_factory=dict)  # engine-breaking requests, by kind and status
    engines_failed: int = 0  # processes that they ended
    unmet: list[str] = field(default_factory=list)  # what the plan asks of these figures, and did not get
    messages: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing failed, was wrong, leaked or crashed, and all was mended; pauses are not judged."""
        return not (
            self.failed
            or self.wrong
            or self.refused_needlessly
            or self.leaks.any
            or self.crashes
            or self.unhealed
            or self.unmet
        )

    def meet(self, least: Mapping[str, int], most: Mapping[str, int]) -> None:
        """Note which of these figures are beyond the plan's bounds: without them it may prove nothing."""
        found = {**self.retries, "recomputed": self.recomputed, "most_booked": self.most_booked}
        self.unmet += [
            f"{name} is {found.get(name, 0)}, and should be {bound} at least"
            for name, bound in least.items()
            if found.get(name, 0) < bound
        ]
        self.unmet += [
            f"{name} is {found.get(name, 0)}, and should be {bound} at most"
            for name, bound in most.items()
            if found.get(name, 0) > bound
        ]

    def add(
        self,
        answers: Sequence[Answer],
        expected: Sequence[list[int]],
        uncovered: Sequence[Span],
        struck: Sequence[float] = (),
    ) -> None:
        """Judge the answers.

        `uncovered`: times without a worker; a router that hangs sends nothing. `struck`: when each fault did
        its harm. A pause in which several struck may take a lease for each: they may have hit one request.
        """
        longest: list[tuple[float, str]] = []
        for answer, right in zip(answers, expected, strict=True):
            fate, how = judge(answer, right)
            self.requests += 1
            self.streams += answer.case.stream
            self.tokens += len(answer.tokens)
            self.wrong += fate is Fate.WRONG
            self.failed += fate is Fate.FAILED
            self.router_lost += fate is Fate.ROUTER_LOST
            needless = sum(not _within(when, uncovered) for when in answer.refused)
            self.refused += len(answer.refused) - needless
            self.refused_needlessly += needless
            if needless:
                self.note(f"{answer.request_id}: 503 while a worker could serve")
            if how and fate is not Fate.ROUTER_LOST:
                self.note(how)
            pauses = answer.pauses()[self.full :] if fate is Fate.RIGHT else []
            if pauses:
                took_s, began = max((end - start, start) for start, end in pauses)
                when = f"{began - self.began_at:.1f} s after the start"
                longest.append((took_s, f"{answer.request_id}, {when}"))
                without = [*uncovered, *answer.router.hung_times]
                self._add_covered(answer, pauses, without, struck)
        if longest:
            took = [one for one, _ in longest]
            self.longest_pause_s, self.longest_pause_of = max(longest)
            self.p50_pause_s, self.p99_pause_s = percentile(took, 0.5), percentile(took, 0.99)

    def _add_covered(
        self, answer: Answer, pauses: Sequence[Span], without: Sequence[Span], struck: Sequence[float]
    ) -> None:
        """Judge each pause from its first fault on. What was waited before that is none of the fault's doing.

        It may have been in a queue, so it is judged by itself.
        """
        for event, (start, end) in enumerate(pauses, int(self.full)):
            hits = [when for when in struck if start <= when <= end]
            hit = min(hits, default=start)
            before_s, since_s = covered_s((start, hit), without), covered_s((hit, end), without)
            self.longest_covered_pause_s = max(self.longest_covered_pause_s, before_s + since_s)
            more_s = max(0, len(hits) - 1) * (self.pause_limit_s - ADDED_S)
            more_s += TURN_S if hits and answer.case.batch else 0.0
            if self.pause_limit_s and max(before_s, since_s - more_s) > self.pause_limit_s:
                self.over_limit += 1
                began_s = start - self.began_at
                where = f"before its event {event}, {began_s:.1f} s after the start"
                of_it = f", {since_s:.2f} s of it since a fault struck" if hits else ""
                self.note(f"{answer.request_id}: a pause of {before_s + since_s:.2f} s {where}{of_it}")

    def note(self, message: str) -> None:
        if len(self.messages) < KEPT:
            self.messages.append(message)

    def as_json(self) -> dict[str, Any]:
        figures = asdict(self)
        return {
            key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()
        } | {"good": self.good}

    def __str__(self) -> str:
        leaked = f"{self.leaks.blocks} blocks, {self.leaks.leases} leases" + (
            f" ({self.leaks})" if self.leaks.any else ""
        )
        limit = f"limit {self.pause_limit_s:.1f} s ({self.over_limit} over it)"
        poison = f"{counts(self.poison)}; {self.engines_failed} processes ended with their engine"
        lines = [
            f"{self.plan}, {self.shape}, seed {self.seed}: {'good' if self.good else 'NOT GOOD'}",
            f"  {self.requests} requests ({self.streams} streams), {self.tokens} tokens: "
            f"{self.failed} failed, {self.wrong} wrong, {self.refused} refused while no worker could serve, "
            f"{self.refused_needlessly} needlessly, {self.router_lost} of killed routers",
            f"  longest pause {self.longest_pause_s:.2f} s ({self.longest_pause_of}); with a worker left "
            f"{self.longest_covered_pause_s:.2f} s, {limit if self.pause_limit_s else 'no limit'}; "
            f"p50 {self.p50_pause_s:.2f} s, p99 {self.p99_pause_s:.2f} s",
            f"  left: {leaked}; clean {self.clean_after_s:.1f} s after the end; {self.restarts} restarts",
            f"  faults: {counts(self.faults)}",
            f"  requests hit: {counts(self.stages)}",
            *([f"  poison: {poison}"] if self.poison else []),
            f"  attempts that failed: {counts(self.retries)}; {self.recomputed} prompts recomputed; "
            f"{self.most_booked} requests at one decode worker at most",
            *(f"  crash: {one}" for one in self.crashes),
            *(f"  not mended: {one}" for one in self.unhealed),
            *(f"  not met: {one}" for one in self.unmet),
            *(f"  - {one}" for one in self.messages),
        ]
        return "\n".join(lines)


def covered_s(pause: Span, uncovered: Sequence[Span]) -> float:
    """Return how much of a pause lies in times in which some worker could serve."""
    start, end = pause
    return (end - start) - sum(max(0.0, min(end, to) - max(start, since)) for since, to in uncovered)


def _within(when: float, spans: Sequence[Span]) -> bool:
    return any(since <= when <= to for since, to in spans)


def counts(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
