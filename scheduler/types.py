"""The scheduler's state, as plain objects with their invariants.

Wire messages (`baton.protos.scheduler_pb2`) are kept as they are if the scheduler only passes them on: a
worker's identity and load, an attempt's cost. The objects that it reasons about are here: the workers
(`WorkerRecord`, `FleetView`), what an attempt holds of them (`Booking`, `Known`), and the reports of routers.
An attempt's needs are in `need.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb


class PlacementLimits(Protocol):
    """The bounds on a worker's load, found in the scheduler's settings and in its snapshots for routers."""

    max_queued_prompt_tokens: int
    max_queue_factor: float
    handoff_min_tokens: int
    idle_decode_tokens: int
    prefix_pull_s: float


def same_limits(one: PlacementLimits, other: PlacementLimits) -> bool:
    """Return whether all limits of both are equal."""
    return all(getattr(one, name) == getattr(other, name) for name in PlacementLimits.__annotations__)


class PolicyOptions(Protocol):
    """The parts of a placement policy, by name; `PolicySettings` of the configuration tree is one."""

    filters: list[str]  # applied in this order
    pair_filters: list[str]
    scorers: dict[str, float]  # name -> weight above 0; scores are averaged by weight
    picker: str


class SchedulerOptions(PlacementLimits, Protocol):
    """The scheduler's settings; `SchedulerSettings` of the configuration tree is one."""

    address: str  # host:port
    store: str  # memory, redis:// or rediss://
    topic: str
    heartbeat_s: float
    worker_lease_s: float
    placement_lease_s: float
    rebalance_after_s: float | None

    @property
    def policy(self) -> PolicyOptions:
        """The parts of the placement policy."""


@dataclass(slots=True)
class Reserved:
    """Sum up the bookings on one worker; never below zero."""

    prompt_tokens: int = 0  # placed here and not yet prefilled
    requests: int = 0  # placed here and not yet done here
    blocks: int = 0  # KV-cache blocks for requests to be decoded here
    decoding: int = 0  # requests that are prefilled, and decode here

    @property
    def empty(self) -> bool:
        return not (self.prompt_tokens or self.requests or self.blocks or self.decoding)

    def add(self, other: Reserved) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.requests += other.requests
        self.blocks += other.blocks
        self.decoding += other.decoding

    def take(self, other: Reserved) -> None:
        """Undo `add`, clamping at zero: a snapshot may be of another moment."""
        self.prompt_tokens = max(0, self.prompt_tokens - other.prompt_tokens)
        self.requests = max(0, self.requests - other.requests)
        self.blocks = max(0, self.blocks - other.blocks)
        self.decoding = max(0, self.decoding - other.decoding)


@dataclass(slots=True)
class WorkerRecord:
    """Describe one live worker."""

    identity: pb.WorkerIdentity
    state: pb.WorkerState
    load: pb.WorkerLoad | None  # None before its first heartbeat
    reserved: Reserved
    drain_asked: bool  # an operator drained its name
    heard_at: float  # time of its last message, on the clock of the record's owner, seconds
    epoch: int = 0  # epoch of its last message
    # Copied from the identity, which never changes: each placement reads them dozens of times.
    worker_id: str = field(init=False, repr=False)
    role: pb.Role = field(init=False, repr=False)
    capacity: pb.Capacity = field(init=False, repr=False)

    def __post_init__(self) -> None:
        one = self.identity
        self.worker_id, self.role, self.capacity = one.worker_id, one.role, one.capacity

    @property
    def held(self) -> bool:
        """Whether it would take requests if an operator had not drained its name."""
        return self.drain_asked and self.state != pb.WORKER_STATE_DRAINING

    @property
    def placeable(self) -> bool:
        """Whether it takes new requests: its engine is loaded, and it is not drained."""
        ready = self.state == pb.WORKER_STATE_READY and not self.drain_asked
        return ready and self.identity.HasField("capacity")


@dataclass(frozen=True, slots=True)
class FleetView:
    """Hold all live workers, with what is booked on them.

    The records are updated in place: read what you need at once.
    """

    workers: dict[str, WorkerRecord]
    # cache of `of`
    by_roles: dict[tuple[int, ...], list[WorkerRecord]] = field(default_factory=dict, repr=False)

    def of(self, *roles: pb.Role) -> list[WorkerRecord]:
        """Return the workers of these roles, in this order; do not change the list. Cached."""
        found = self.by_roles.get(roles)
        if found is None:
            found = [one for role in roles for one in self.workers.values() if one.role == role]
            self.by_roles[roles] = found
        return found


@dataclass(frozen=True, slots=True)
class Booking:
    """Describe the share of its workers that one attempt holds.

    The worker that runs the prompt (the prefill worker, or the decode worker if there is none) gets the
    prompt's tokens, the decode worker the blocks; each of them gets one request.
    """

    attempt: Attempt
    router_id: str
    prefill_id: str  # empty: the decode worker does it all
    decode_id: str
    prompt_tokens: int
    blocks: int

    def __post_init__(self) -> None:
        if not self.decode_id or self.decode_id == self.prefill_id:
            raise ValueError(
                f"a booking needs a decode worker beside {self.prefill_id!r}, got {self.decode_id!r}"
            )

    @property
    def prompt_worker_id(self) -> str:
        """The worker that runs the prompt."""
        return self.prefill_id or self.decode_id

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Both workers, or the only one."""
        return (self.prefill_id, self.decode_id) if self.prefill_id else (self.decode_id,)

    def share(self, worker_id: str, *, prefilled: bool = False) -> Reserved:
        """Return what the attempt holds of `worker_id`; no prompt tokens once `prefilled`."""
        prefills = worker_id == self.prompt_worker_id and not prefilled
        decodes = worker_id == self.decode_id
        return Reserved(
            prompt_tokens=self.prompt_tokens if prefills else 0,
            requests=1 if prefills or decodes else 0,
            blocks=self.blocks if decodes else 0,
            decoding=1 if decodes and prefilled else 0,
        )


@dataclass(frozen=True, slots=True)
class Known:
    """Describe a live attempt as its router reports it: what it holds, and how far it is."""

    booking: Booking
    prefilled: bool = False

    @property
    def attempt(self) -> Attempt:
        return self.booking.attempt


@dataclass(frozen=True, slots=True)
class RouterReport:
    """Collect the events of a router's attempts since its last report; applied in the order of the fields."""

    placed: tuple[Known, ...] = ()  # placed by another scheduler or the router itself, or reported again
    prefilled: tuple[Attempt, ...] = ()
    finished: tuple[tuple[Attempt, pb.Finished], ...] = ()
    renewed: tuple[Attempt, ...] = ()
    shared: tuple[tuple[Attempt, int], ...] = ()  # attempt, KV blocks that remain booked

    @classmethod
    def from_wire(cls, request: pb.ReportRequest) -> RouterReport:
        """Take a report from the wire. Raises ValueError for an event without request id or epoch."""
        return cls(
            placed=tuple(known_from_wire(booking, request.router_id) for booking in request.placed),
            prefilled=attempts_from_wire(request.prefilled),
            finished=tuple((attempt_from_wire(event.attempt), event) for event in request.finished),
            renewed=attempts_from_wire(request.renewed),
            shared=tuple((attempt_from_wire(event.attempt), event.blocks) for event in request.shared),
        )


@dataclass(slots=True)
class ReportResult:
    """The answer to a report."""

    lost: list[Attempt] = field(default_factory=list)  # renewed, but not booked (any more)
    fenced: list[Attempt] = field(default_factory=list)  # renewed or placed, but superseded or over
    stale: int = 0  # ignored events with an older epoch than the last one placed


@dataclass(frozen=True, slots=True)
class Deployment:
    """Name the model that every worker of a topic must serve, and the first worker that registered with it.

    vLLM's version and the model's revision may differ: during an upgrade both are present.
    """

    model: str
    worker_id: str

    @classmethod
    def of(cls, identity: pb.WorkerIdentity) -> Deployment:
        """Return the deployment that this worker would start."""
        return cls(identity.model, identity.worker_id)

    def refusal(self, topic: str, newcomer: Deployment) -> str:
        """Return a one-line reason why `newcomer` does not fit, naming both sides; empty if it does."""
        if newcomer.model == self.model:
            return ""
        here = f"in topic {topic!r} (worker {self.worker_id})"
        return f"model {newcomer.model!r} here, {self.model!r} {here}: serve one model a topic"


@dataclass(frozen=True, slots=True)
class Heard:
    """The answer to a heartbeat."""

    known: bool
    drain: bool
    stale: bool = False  # ignored: it carried an older epoch than the worker's last message


@dataclass(frozen=True, slots=True)
class Told:
    """Messages of processes about themselves, and the current orders; serialized by the callers."""

    routers: Mapping[str, bytes] = field(default_factory=dict)
    fleets: Mapping[str, bytes] = field(default_factory=dict)
    orders: Mapping[str, bytes] = field(default_factory=dict)  # keyed by fleet
    processes: Mapping[str, bytes] = field(default_factory=dict)  # addresses of routers and schedulers
    # scheduler -> requests waiting for room (turns.py)
    turns: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class History:
    """Attempts under way and finished ones, for operators."""

    attempts: list[pb.LiveAttempt]
    handoffs: list[pb.PastHandoff]


def name_of(identity: pb.WorkerIdentity) -> str:
    """Return the name that a worker keeps across restarts."""
    return identity.name or identity.worker_id


def shares(known: Known) -> Iterator[tuple[str, Reserved]]:
    """Yield each worker's id and what an attempt now holds of it, if anything."""
    booking = known.booking
    for worker_id in booking.worker_ids:
        share = booking.share(worker_id, prefilled=known.prefilled)
        if not share.empty:
            yield worker_id, share


def attempt_from_wire(message: pb.Attempt) -> Attempt:
    """Take an attempt from the wire. Raises ValueError when the id or the epoch is missing."""
    return Attempt(message.request_id, message.epoch)


def attempts_from_wire(messages: Iterable[pb.Attempt]) -> tuple[Attempt, ...]:
    """Take attempts from the wire. Raises ValueError when an id or an epoch is missing."""
    return tuple(attempt_from_wire(message) for message in messages)


def attempt_to_wire(attempt: Attempt) -> pb.Attempt:
    return pb.Attempt(request_id=attempt.request_id, epoch=attempt.epoch)


def booked_to_wire(worker_id: str, booked: Reserved) -> pb.Booked:
    """Return the message for a worker's bookings."""
    return pb.Booked(
        worker_id=worker_id,
        prompt_tokens=booked.prompt_tokens,
        requests=booked.requests,
        blocks=booked.blocks,
        decoding=booked.decoding,
    )


def worker_to_wire(record: WorkerRecord) -> pb.Worker:
    """Return what a router needs to know of a worker that it was given."""
    identity = record.identity
    return pb.Worker(
        worker_id=identity.worker_id,
        address=identity.address,
        role=identity.role,
        model_fingerprint=identity.model_fingerprint,
    )


def known_from_wire(message: pb.Booking, router_id: str) -> Known:
    """Take a router's booking from the wire. Raises ValueError for an invalid one."""
    attempt = attempt_from_wire(message.attempt)
    booking = Booking(
        attempt=attempt,
        router_id=router_id,
        prefill_id=message.prefill_worker_id,
        decode_id=message.decode_worker_id,
        prompt_tokens=message.prompt_tokens,
        blocks=message.blocks,
    )
    return Known(booking, prefilled=message.read)


def known_to_wire(known: Known) -> pb.Booking:
    """Return the message of a live attempt's booking."""
    booking = known.booking
    return pb.Booking(
        attempt=attempt_to_wire(known.attempt),
        prefill_worker_id=booking.prefill_id,
        decode_worker_id=booking.decode_id,
        prompt_tokens=booking.prompt_tokens,
        blocks=booking.blocks,
        read=known.prefilled,
    )
