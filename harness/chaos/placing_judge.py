"""The figures of a placing plan, and the workers without engines that judge it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, Start
from baton.scheduler.booking import max_requests, usable_blocks
from baton.scheduler.servicer import SHOWN_ATTEMPTS
from baton.scheduler.types import Booking, PlacementLimits, Reserved
from baton.services.engine.errors import RequestRefused
from baton.services.worker.admission import Admission, Share
from harness.chaos.outcome import Span, told
from harness.stats import percentile

KEPT = 5  # messages kept of each kind
LAG_S = 1.0  # a scheduler is told of an event this soon, even on a busy machine


@dataclass(slots=True, eq=False)
class Stay:
    """A placed attempt on its workers. Times are time.monotonic's."""

    booking: Booking
    since: float
    read_at: float = math.inf  # when its prompt was prefilled
    until: float = math.inf
    shares: dict[str, Share] = field(default_factory=dict)  # worker id -> its share of that worker

    def share(self, worker_id: str, read: float, ended: float) -> Reserved:
        """Return its share of a worker.

        It counts as prefilled if it was by `read`, and as ended if it was by `ended`.
        """
        if self.until <= ended:
            return Reserved()
        return replace(self.booking, prefilled=self.read_at <= read).share(worker_id)


class Workers:
    """Workers without engines that admit or refuse attempts as real ones do.

    They check the schedulers' sums against the attempts. A scheduler learns of an attempt one message later,
    so each sum has a lower and an upper bound.
    """

    def __init__(self, capacity: pb.Capacity, limits: PlacementLimits) -> None:
        self._limits, self._capacity = limits, capacity
        self._most = max_requests(capacity, limits), usable_blocks(capacity)
        self._admissions: dict[str, Admission] = {}
        self._stays: dict[str, list[Stay]] = {}  # worker id -> current and recent stays
        self.fullest = 0.0  # highest utilization of a worker's bounds

    def take(self, booking: Booking, now: float) -> tuple[Stay, str]:
        """Admit an attempt to its workers. Return its stay, and the id of a worker that refuses it or ""."""
        stay = Stay(booking, now)
        for worker_id in booking.worker_ids:
            self._stays.setdefault(worker_id, []).append(stay)
        for worker_id in booking.worker_ids:
            held = booking.share(worker_id)
            phase = PHASE_PREFILL if worker_id == booking.prefill_id else PHASE_DECODE
            start = Start(phase=phase, prompt_tokens=held.prompt_tokens, blocks=held.blocks)
            try:
                stay.shares[worker_id] = self._of(worker_id).take(start)
            except RequestRefused:
                self.end(stay, now)
                return stay, worker_id
        decode, (requests, blocks) = self._of(booking.decode_id), self._most
        self.fullest = max(self.fullest, decode.requests / requests, decode.blocks / blocks)
        return stay, ""

    def prefilled(self, stay: Stay, now: float) -> None:
        stay.read_at = now
        for worker_id, share in stay.shares.items():
            self._of(worker_id).prefilled(share)
            if worker_id == stay.booking.prefill_id:
                self._of(worker_id).give_back(share)

    def end(self, stay: Stay, now: float) -> None:
        stay.until = now
        for worker_id, share in stay.shares.items():
            self._of(worker_id).give_back(share)

    def unlike(self, told: pb.Description, asked: float, got: float) -> list[str]:
        """Return a description's missing attempts and impossible sums.

        It was requested at `asked` and received at `got`.
        """
        begin, end = asked - LAG_S, got + LAG_S
        known = {(one.attempt.request_id, one.attempt.epoch) for one in told.attempts}
        whole = len(known) < SHOWN_ATTEMPTS
        found = []
        for worker in told.workers:
            worker_id = worker.identity.worker_id
            least, most = Reserved(), Reserved()
            stays = [one for one in self._stays.get(worker_id, ()) if one.until >= begin]
            self._stays[worker_id] = stays
            for stay in stays:
                if stay.since <= end:
                    most.add(stay.share(worker_id, begin, -math.inf))
                if stay.since <= begin:
                    least.add(stay.share(worker_id, end, end))
                    attempt = stay.booking.attempt
                    lacks = stay.until > end and (attempt.request_id, attempt.epoch) not in known
                    found += [f"{worker_id}: it lacks {attempt}"] if lacks and whole else []
            for what, sum_, low, high in (
                ("prompt tokens", worker.reserved_prompt_tokens, least.prompt_tokens, most.prompt_tokens),
                ("requests", worker.reserved_requests, least.requests, most.requests),
                ("blocks", worker.reserved_blocks, least.blocks, most.blocks),
            ):
                if not low <= sum_ <= high:
                    found.append(f"{worker_id}: {sum_} {what}, which can only be {low} to {high}")
        return found

    def _of(self, worker_id: str) -> Admission:
        if worker_id not in self._admissions:
            self._admissions[worker_id] = Admission(self._limits)
            self._admissions[worker_id].fit(self._capacity)
        return self._admissions[worker_id]


@dataclass
class Latency:
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


@dataclass
class Left:
    """Attempts and reservations that the schedulers still hold."""

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
    rate: int  # requests per second
    workers: int
    routers: int
    schedulers: int
    began_at: float = 0.0  # time.monotonic
    seconds: float = 0.0
    requests: int = 0
    placed: int = 0  # attempts
    alone: int = 0  # attempts that a router placed itself
    refused: int = 0  # requests for which all workers were full
    sent_back: int = 0  # attempts that a full worker refused
    sent_back_alone: int = 0  # attempts that a router had placed itself
    failed: int = 0  # other failures
    failures: dict[str, int] = field(default_factory=dict)  # reason -> requests
    late: int = 0  # epochs that were sent twice
    twice: int = 0  # epochs that were placed twice, or booked on other workers
    compared: int = 0  # compared descriptions of schedulers
    unlike: int = 0  # descriptions with impossible sums
    fullest: float = 0.0  # highest utilization of a worker's bounds
    dropped: int = 0  # lost reports
    calm: Latency = field(default_factory=Latency)  # placements between faults
    disturbed: Latency = field(default_factory=Latency)  # placements from a fault until the site is whole
    left: Left = field(default_factory=Left)
    clean_after_s: float = 0.0  # the time from the last request until nothing was left
    restarts: int = 0
    crashes: list[str] = field(default_factory=list)
    unhealed: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether each request was placed once or refused as full, with right sums. Ignores times."""
        wrong = self.failed or self.twice or self.unlike or self.left.any or self.crashes or self.unhealed
        return self.placed > 0 and self.compared > 0 and not wrong

    def add(self, placements: Iterable[tuple[float, float]], disturbed: Sequence[Span]) -> None:
        """Add the latencies of placements, during faults and between them."""
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

    def compare(self, unlike: Sequence[str], scheduler: str) -> None:
        """Count a scheduler's description and note its impossible sums."""
        self.compared += 1
        self.unlike += bool(unlike)
        if unlike and self.unlike <= KEPT:
            self.messages.append(f"{scheduler}: {'; '.join(unlike[:KEPT])}")

    def place_twice(self, message: str) -> None:
        self.twice += 1
        if self.twice <= KEPT:
            self.messages.append(message)

    def __str__(self) -> str:
        return told(self)
