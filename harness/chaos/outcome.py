"""The figures of a plan's run, and whether they are good enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml

from baton.protos import scheduler_pb2 as pb
from baton.services.classes import ClassesSettings
from harness.chaos.load import Answer, Fate, judge
from harness.stats import percentile

KEPT = 20  # messages kept of each kind
ADDED_S = 2.0  # a pause may last a lease plus this
LATE_S = 0.5  # tokens may still arrive for this long after the fault that stopped them
TURN_S = ClassesSettings().batch.patience_s  # batch work may wait this long to be prefilled again

Span = tuple[float, float]  # start and end; time.monotonic


@dataclass
class Leaks:
    """Resources that should have been released."""

    blocks: int = 0  # KV cache
    attempts: int = 0  # live at the scheduler
    reservations: int = 0
    pinned: int = 0  # handoffs
    pinned_bytes: int = 0
    running: int = 0  # requests in engines
    segments: int = 0  # shared memory files after the end

    @property
    def leases(self) -> int:
        return self.attempts + self.reservations + self.pinned

    @property
    def any(self) -> bool:
        return any(asdict(self).values())


def leaks(told: pb.Description) -> Leaks:
    """Return the resources that a deployment holds and an idle one would not. Cached blocks count as free."""
    found = Leaks(attempts=len(told.attempts))
    for one in told.workers:
        usable = one.identity.capacity.num_blocks - 1  # one block is vLLM's null block
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
    refused: int = 0  # 503 while no worker could serve; retried
    refused_needlessly: int = 0  # 503 while a worker could serve; counts as failed
    router_lost: int = 0  # requests of killed routers
    longest_pause_s: float = 0.0
    longest_pause_of: str = ""
    longest_covered_pause_s: float = 0.0  # leaves out times in which no worker was left or the router hung
    pause_limit_s: float = 0.0  # a lease and ADDED_S, plus a lease per further fault in a pause; 0: no limit
    full: bool = False  # requests wait for slots, so the time to first token is not a pause
    over_limit: int = 0  # covered pauses beyond the limit
    p50_pause_s: float = 0.0  # percentiles of the answers' longest pauses
    p99_pause_s: float = 0.0
    leaks: Leaks = field(default_factory=Leaks)
    clean_after_s: float = 0.0  # the time from the last answer until all resources were released
    restarts: int = 0
    crashes: list[str] = field(default_factory=list)
    unhealed: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)  # requests that faults hit, by role and stage
    retries: dict[str, int] = field(default_factory=dict)  # failed attempts, by trouble
    recomputed: int = 0  # prompts that their decode worker prefilled again
    most_booked: int = 0  # highest number of requests on one decode worker
    poison: dict[str, int] = field(default_factory=dict)  # poisonous requests, by kind and status
    engines_failed: int = 0  # processes that poisonous requests ended
    unmet: list[str] = field(default_factory=list)  # figures outside the plan's bounds
    messages: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing failed, was wrong, leaked, crashed or stayed broken. Ignores pauses."""
        failed = self.failed or self.wrong or self.refused_needlessly or self.leaks.any
        return not (failed or self.crashes or self.unhealed or self.unmet)

    def meet(self, least: Mapping[str, int], most: Mapping[str, int]) -> None:
        """Note figures outside the plan's bounds: such a run would prove nothing."""
        found = {**self.retries, "recomputed": self.recomputed, "most_booked": self.most_booked}
        for bounds, which, sign in ((least, "least", 1), (most, "most", -1)):
            for name, bound in bounds.items():
                if sign * (value := found.get(name, 0)) < sign * bound:
                    self.unmet.append(f"{name} is {value} and should be at {which} {bound}")

    def add(
        self,
        answers: Sequence[Answer],
        expected: Sequence[list[int]],
        uncovered: Sequence[Span],
        struck: Sequence[float] = (),
    ) -> None:
        """Judge the answers.

        uncovered: times without a worker; struck: times of faults. A pause with several faults may take a
        lease for each of them, because all may have hit the request.
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
            needless = sum(not any(since <= when <= to for since, to in uncovered) for when in answer.refused)
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
        """Judge each pause before and after its first fault separately: the first part may be queueing."""
        for event, (start, end) in enumerate(pauses, int(self.full)):
            hits = [when for when in struck if start <= when <= end]
            if not hits and any(start - LATE_S <= when < start for when in struck):
                hits = [start]
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

    def __str__(self) -> str:
        return told(self)


def covered_s(pause: Span, uncovered: Sequence[Span]) -> float:
    """Return how long a worker could serve during a pause."""
    start, end = pause
    return (end - start) - sum(max(0.0, min(end, to) - max(start, since)) for since, to in uncovered)


def as_json(outcome: Any) -> dict[str, Any]:
    figures = {**asdict(outcome), "good": outcome.good}
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}


def told(outcome: Any) -> str:
    """Return an outcome's figures as YAML, without zeros and empty values."""
    figures = {key: value for key, value in as_json(outcome).items() if value and key != "began_at"}
    return yaml.safe_dump({"good" if outcome.good else "NOT GOOD": figures}, sort_keys=False, width=1000)
