"""The scheduler's state as plain objects; data that it only passes on stays protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb


class PlacementLimits(Protocol):
    """Limits on a worker's load. The scheduler's settings have them, and so do its snapshots for routers."""

    max_queued_prompt_tokens: int
    handoff_min_tokens: int
    idle_decode_tokens: int

    @property
    def max_queue_factor(self) -> float: ...
    @property
    def prefix_pull_s(self) -> float: ...


LIMITS = (*PlacementLimits.__annotations__, "max_queue_factor", "prefix_pull_s")


def same_limits(one: PlacementLimits, other: PlacementLimits) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in LIMITS)


class PolicyOptions(Protocol):
    """Names the parts of a placement policy. The configuration's `PolicySettings` implements it."""

    filters: list[str]  # applied in this order
    pair_filters: list[str]
    scorers: dict[str, float]  # name -> weight above 0; scores are averaged by weight
    picker: str


class SchedulerOptions(PlacementLimits, Protocol):
    """The scheduler's settings. The configuration's `SchedulerSettings` implements it."""

    address: str  # host:port
    store: str  # memory, redis:// or rediss://
    topic: str
    worker_lease_s: float

    @property
    def heartbeat_s(self) -> float: ...
    @property
    def placement_lease_s(self) -> float: ...
    @property
    def policy(self) -> PolicyOptions: ...


@dataclass(slots=True)
class Reserved:
    """The total of the bookings on one worker; never negative."""

    prompt_tokens: int = 0  # placed here and not prefilled yet
    requests: int = 0  # placed here and not finished here
    blocks: int = 0  # KV blocks of the requests that decode here
    decoding: int = 0  # requests that are prefilled and decode here

    @property
    def empty(self) -> bool:
        return not (self.prompt_tokens or self.requests or self.blocks or self.decoding)

    def add(self, other: Reserved) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.requests += other.requests
        self.blocks += other.blocks
        self.decoding += other.decoding

    def take(self, other: Reserved) -> None:
        """Undo `add`. Clamps at zero, because a snapshot may be out of date."""
        self.prompt_tokens = max(0, self.prompt_tokens - other.prompt_tokens)
        self.requests = max(0, self.requests - other.requests)
        self.blocks = max(0, self.blocks - other.blocks)
        self.decoding = max(0, self.decoding - other.decoding)


@dataclass(slots=True)
class WorkerRecord:
    identity: pb.WorkerIdentity
    state: pb.WorkerState
    load: pb.WorkerLoad | None  # None before its first heartbeat
    reserved: Reserved
    drain_asked: bool  # an operator drained its name
    heard_at: float  # when its last message came: seconds on the owner's clock
    epoch: int = 0  # epoch of its last message
    # Copied from the identity, because each placement reads them dozens of times.
    worker_id: str = field(init=False, repr=False)
    role: pb.Role = field(init=False, repr=False)
    capacity: pb.Capacity = field(init=False, repr=False)
    seat: tuple[str, str, int, int] | None = field(default=None, init=False, repr=False)  # see `pb.Gang`
    # Set by FleetView: the known members of its gang in the same life, by rank, and whether none is missing.
    gang: list[WorkerRecord] | None = field(default=None, init=False, repr=False, compare=False)
    whole: bool = field(default=True, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        one = self.identity
        self.worker_id, self.role, self.capacity = one.worker_id, one.role, one.capacity
        if one.HasField("gang"):
            self.seat = one.gang.name, one.gang.life, one.gang.rank, one.gang.size

    @property
    def held(self) -> bool:
        """Whether an operator's drain of its name is all that keeps it from taking requests."""
        return self.drain_asked and self.state != pb.WORKER_STATE_DRAINING

    @property
    def placeable(self) -> bool:
        """Whether it takes new requests: its engine is loaded; neither it nor a gang member is draining."""
        return self.whole and self.ready

    @property
    def members(self) -> list[WorkerRecord]:
        """Its gang's workers of the same life, or itself alone."""
        return self.gang or [self]

    @property
    def ready(self) -> bool:
        """Whether the worker itself can take new requests, whatever the state of the rest of its gang."""
        ready = self.state == pb.WORKER_STATE_READY and not self.drain_asked
        return ready and self.identity.HasField("capacity")


@dataclass(frozen=True, slots=True)
class FleetView:
    """All live workers and their bookings. Records are updated in place: do not use them across an await.

    The view is valid until a worker comes or goes, or a member of a gang changes state or is drained.
    """

    workers: dict[str, WorkerRecord]
    by_roles: dict[tuple[int, ...], list[WorkerRecord]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        gangs: dict[tuple[str, str], list[tuple[int, WorkerRecord]]] = {}
        for one in self.workers.values():
            if one.seat is not None:
                name, life, rank, _ = one.seat
                gangs.setdefault((name, life), []).append((rank, one))
        for (_, life), seats in gangs.items():
            members = [one for _, one in sorted(seats, key=lambda seat: seat[0])]
            ready = sum(one.ready for one in members)
            for one in members:
                one.gang, one.whole = members, bool(life and one.seat and ready == one.seat[3])

    def units(self) -> Iterator[list[WorkerRecord]]:
        """Yield the units that start, change roles and end as one: a gang by rank, or one worker."""
        for one in self.workers.values():
            if one.members[0] is one:
                yield one.members

    def of(self, *roles: pb.Role) -> list[WorkerRecord]:
        """Return the workers with these roles, in this order. The list is cached: do not change it."""
        found = self.by_roles.get(roles)
        if found is None:
            found = [one for role in roles for one in self.workers.values() if one.role == role]
            self.by_roles[roles] = found
        return found


@dataclass(frozen=True, slots=True)
class Booking:
    """The bookings of one attempt on its workers.

    The worker that runs the prompt (the prefill worker, or the decode worker if there is none) is charged the
    prompt's tokens, the decode worker the blocks, and each of them one request.
    """

    attempt: Attempt
    router_id: str
    prefill_id: str  # empty: the decode worker also prefills
    decode_id: str
    prompt_tokens: int
    blocks: int
    prefilled: bool = False  # the prompt's tokens and the prefill worker are no longer booked

    def __post_init__(self) -> None:
        if not self.decode_id or self.decode_id == self.prefill_id:
            raise ValueError(
                f"a booking needs a decode worker beside {self.prefill_id!r}, got {self.decode_id!r}"
            )

    @property
    def prompt_worker_id(self) -> str:
        return self.prefill_id or self.decode_id

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return (self.prefill_id, self.decode_id) if self.prefill_id else (self.decode_id,)

    def share(self, worker_id: str) -> Reserved:
        """Return the part booked on `worker_id`."""
        prefills = worker_id == self.prompt_worker_id and not self.prefilled
        decodes = worker_id == self.decode_id
        return Reserved(
            prompt_tokens=self.prompt_tokens if prefills else 0,
            requests=1 if prefills or decodes else 0,
            blocks=self.blocks if decodes else 0,
            decoding=1 if decodes and self.prefilled else 0,
        )

    def shares(self) -> Iterator[tuple[str, Reserved]]:
        """Yield the id of each worker on which something is still booked, with the booked amounts."""
        for worker_id in self.worker_ids:
            if not (share := self.share(worker_id)).empty:
                yield worker_id, share


@dataclass(frozen=True, slots=True)
class RouterReport:
    """Events of a router's attempts since its last report, applied in the order of the fields."""

    placed: tuple[Booking, ...] = ()  # placed by another scheduler or by the router itself, or reported again
    prefilled: tuple[Attempt, ...] = ()
    finished: tuple[tuple[Attempt, pb.Finished], ...] = ()
    renewed: tuple[Attempt, ...] = ()
    shared: tuple[tuple[Attempt, int], ...] = ()  # attempt, KV blocks that stay booked

    @classmethod
    def from_wire(cls, request: pb.ReportRequest) -> RouterReport:
        """Convert a message. Raises ValueError for an event without request id or epoch."""
        return cls(
            placed=tuple(booking_from_wire(booking, request.router_id) for booking in request.placed),
            prefilled=attempts_from_wire(request.prefilled),
            finished=tuple((attempt_from_wire(event.attempt), event) for event in request.finished),
            renewed=attempts_from_wire(request.renewed),
            shared=tuple((attempt_from_wire(event.attempt), event.blocks) for event in request.shared),
        )


@dataclass(slots=True)
class ReportResult:
    lost: list[Attempt] = field(default_factory=list)  # renewed, but not booked here
    fenced: list[Attempt] = field(default_factory=list)  # renewed or placed, but superseded or finished
    stale: int = 0  # events ignored because a later epoch was placed
    ended: list[tuple[Booking, pb.Finished]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Heard:
    known: bool
    drain: bool
    stale: bool = False  # ignored, because the worker's last message had a later epoch


@dataclass(frozen=True, slots=True)
class Told:
    """The last message of each process about itself, and the current orders, all serialized."""

    routers: Mapping[str, bytes] = field(default_factory=dict)
    fleets: Mapping[str, bytes] = field(default_factory=dict)
    orders: Mapping[str, bytes] = field(default_factory=dict)  # keyed by fleet
    processes: Mapping[str, bytes] = field(default_factory=dict)  # routers' and schedulers' own entries
    turns: Mapping[str, bytes] = field(default_factory=dict)  # requests waiting for room, by scheduler


def place_of(identity: pb.WorkerIdentity) -> str:
    """Return the name of a worker's place, the same across restarts: its gang's, or its own."""
    return identity.gang.name or identity.name or identity.worker_id


def attempt_from_wire(message: pb.Attempt) -> Attempt:
    """Convert a message. Raises ValueError when the id or the epoch is missing."""
    return Attempt(message.request_id, message.epoch)


def attempts_from_wire(messages: Iterable[pb.Attempt]) -> tuple[Attempt, ...]:
    return tuple(attempt_from_wire(message) for message in messages)


def attempt_to_wire(attempt: Attempt) -> pb.Attempt:
    return pb.Attempt(request_id=attempt.request_id, epoch=attempt.epoch)


def booked_to_wire(worker_id: str, booked: Reserved) -> pb.Booked:
    return pb.Booked(
        worker_id=worker_id,
        prompt_tokens=booked.prompt_tokens,
        requests=booked.requests,
        blocks=booked.blocks,
        decoding=booked.decoding,
    )


def worker_to_wire(record: WorkerRecord) -> pb.Worker:
    """Return the fields that a router needs to call a worker."""
    identity = record.identity
    return pb.Worker(
        worker_id=identity.worker_id,
        address=identity.address,
        role=identity.role,
        model_fingerprint=identity.model_fingerprint,
    )


def booking_from_wire(message: pb.Booking, router_id: str) -> Booking:
    """Convert a router's booking. Raises ValueError for an invalid one."""
    return Booking(
        attempt=attempt_from_wire(message.attempt),
        router_id=router_id,
        prefill_id=message.prefill_worker_id,
        decode_id=message.decode_worker_id,
        prompt_tokens=message.prompt_tokens,
        blocks=message.blocks,
        prefilled=message.prefilled,
    )


def booking_to_wire(booking: Booking) -> pb.Booking:
    return pb.Booking(
        attempt=attempt_to_wire(booking.attempt),
        prefill_worker_id=booking.prefill_id,
        decode_worker_id=booking.decode_id,
        prompt_tokens=booking.prompt_tokens,
        blocks=booking.blocks,
        prefilled=booking.prefilled,
    )
