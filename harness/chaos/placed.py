"""The outcome of a load of placements: its figures, and whether they are good enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import max_requests, usable_blocks
from baton.scheduler.types import Booking, PlacementLimits, Reserved
from harness.chaos.outcome import Span, counts
from harness.stats import percentile

KEPT = 5  # messages kept of each kind


class Books:
    """The resources that live attempts hold at each worker, as routers know: never more than is booked.

    A worker on which a router placed alone may be fuller: then routers do not see each other's bookings, and
    each may fill the room that all of them saw.
    """

    def __init__(self, capacity: pb.Capacity, limits: PlacementLimits, routers: int) -> None:
        """Start with no bookings; all workers have the same capacity."""
        self._most = Reserved(
            limits.max_queued_prompt_tokens, max_requests(capacity, limits), usable_blocks(capacity)
        )
        self._routers = routers
        self._held: dict[str, Reserved] = {}
        self._alone: Counter[str] = Counter()  # by worker id: attempts that a router placed alone
        self.fullest = 0.0  # share of a worker's bounds, where schedulers placed all of it
        self.fullest_alone = 0.0  # the same where a router placed something alone
        self.beyond = 0  # placements that overbooked a worker

    def add(self, booking: Booking, *, alone: bool) -> None:
        reader = self._held.setdefault(booking.prompt_worker_id, Reserved())
        queued = reader.prompt_tokens
        for worker_id in booking.worker_ids:
            self._held.setdefault(worker_id, Reserved()).add(booking.share(worker_id))
            self._alone[worker_id] += alone
        writer = self._held[booking.decode_id]
        # A prefill worker with an empty queue takes any prompt.
        self._look(booking.prompt_worker_id, queued and reader.prompt_tokens / self._most.prompt_tokens)
        self._look(booking.decode_id, writer.requests / self._most.requests)
        self._look(booking.decode_id, writer.blocks / self._most.blocks)

    def read(self, booking: Booking) -> None:
        for worker_id in booking.worker_ids:
            before, after = booking.share(worker_id), booking.share(worker_id, prefilled=True)
            before.take(after)
            self._held[worker_id].take(before)

    def end(self, booking: Booking, *, alone: bool) -> None:
        """End an attempt whose prompt was prefilled."""
        for worker_id in booking.worker_ids:
            self._held[worker_id].take(booking.share(worker_id, prefilled=True))
            self._alone[worker_id] -= alone

    def _look(self, worker_id: str, share: float) -> None:
        if self._alone[worker_id]:
            self.fullest_alone = max(self.fullest_alone, share)
            self.beyond += share > self._routers
        else:
            self.fullest = max(self.fullest, share)
            self.beyond += share > 1.0


@dataclass
class Latency:
    """The latency of placements, in milliseconds."""

    count: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        if not seconds:
            return cls()
        figures = (percentile(seconds, 0.5), percentile(seconds, 0.99), max(seconds))
        return cls(len(seconds), *(round(1_000 * one, 2) for one in figures))

    def __str__(self) -> str:
        return f"p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.0f} ms, max {self.max_ms:.0f} ms"


@dataclass
class Left:
    """The attempts and reservations that all schedulers together still hold."""

    attempts: int = 0  # live
    requests: int = 0  # reserved on workers
    prompt_tokens: int = 0
    blocks: int = 0
    silent: int = 0  # schedulers that do not answer

    @classmethod
    def of(cls, descriptions: Iterable[pb.Description | None]) -> Left:
        left = cls()
        for one in descriptions:
            if one is None:
                left.silent += 1
                continue
            left.attempts += len(one.attempts)
            for worker in one.workers:
                left.requests += worker.reserved_requests
                left.prompt_tokens += worker.reserved_prompt_tokens
                left.blocks += worker.reserved_blocks
        return left

    @property
    def any(self) -> bool:
        return any(asdict(self).values())


@dataclass
class Placed:
    """The figures of one run of a placing plan."""

    plan: str
    seed: int
    rate: int  # requests a second
    workers: int
    routers: int
    schedulers: int
    began_at: float = 0.0  # time.monotonic
    seconds: float = 0.0
    requests: int = 0
    placed: int = 0  # attempts
    alone: int = 0  # of these, by a router itself
    refused: int = 0  # as all workers were full
    failed: int = 0  # for any other reason
    failures: dict[str, int] = field(default_factory=dict)  # those, by the reason
    late: int = 0  # epochs that were placed once more
    twice: int = 0  # placed twice, or booked on other workers
    beyond: int = 0  # see Books
    fullest: float = 0.0
    fullest_alone: float = 0.0
    dropped: int = 0  # reports that were lost
    calm: Latency = field(default_factory=Latency)  # between faults
    disturbed: Latency = field(default_factory=Latency)  # from a fault to the moment when all is whole again
    left: Left = field(default_factory=Left)
    clean_after_s: float = 0.0  # after the end of the last request
    restarts: int = 0
    crashes: list[str] = field(default_factory=list)
    unhealed: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether all were placed or refused as full, once, within bounds; times are not judged."""
        bad = self.failed or self.twice or self.beyond or self.left.any or self.crashes or self.unhealed
        return self.placed > 0 and not bad

    def add(self, placements: Iterable[tuple[float, float]], disturbed: Sequence[Span]) -> None:
        """Add the latencies of placements, apart for those during faults and those between."""
        calm, other = list[float](), list[float]()
        for began, ended in placements:
            met = any(began < to and since < ended for since, to in disturbed)
            (other if met else calm).append(ended - began)
        self.calm, self.disturbed = Latency.of(calm), Latency.of(other)

    def fail(self, why: str, message: str) -> None:
        self.failed += 1
        self.failures[why] = self.failures.get(why, 0) + 1
        if self.failures[why] <= KEPT:
            self.messages.append(f"{why}: {message}")

    def place_twice(self, message: str) -> None:
        self.twice += 1
        if self.twice <= KEPT:
            self.messages.append(message)

    def as_json(self) -> dict[str, Any]:
        figures = asdict(self)
        return {
            key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()
        } | {"good": self.good}

    def __str__(self) -> str:
        lines = [
            f"{self.plan}, {self.rate} requests/s, {self.workers} workers, {self.routers} routers, "
            f"{self.schedulers} schedulers, seed {self.seed}: {'good' if self.good else 'NOT GOOD'}",
            f"  {self.requests} requests in {self.seconds:.0f} s: {self.placed} attempts placed, "
            f"{self.alone} of them by routers alone; {self.refused} refused as full, {self.failed} failed",
            f"  {self.twice} placed twice ({self.late} epochs repeated); "
            f"{self.beyond} beyond a worker's bounds: the fullest had {self.fullest:.0%}, "
            f"{self.fullest_alone:.0%} where routers placed alone",
            f"  failed: {counts(self.failures)}",
            f"  between faults: {self.calm}",
            f"  in faults: {self.disturbed}",
            f"  left: {self.left}; clean {self.clean_after_s:.1f} s after the end; "
            f"{self.dropped} reports dropped; {self.restarts} restarts",
            f"  faults: {counts(self.faults)}",
            *(f"  crash: {one}" for one in self.crashes),
            *(f"  not mended: {one}" for one in self.unhealed),
            *(f"  - {one}" for one in self.messages),
        ]
        return "\n".join(lines)
