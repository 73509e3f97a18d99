"""The scheduler's state, as plain objects with their invariants.

Wire messages (`baton.protos.scheduler_pb2`) stay what they are where the scheduler only carries them: a
worker's identity and load, an attempt's cost. What it reasons about is here: who needs what (`Need`), who is
there (`WorkerRecord`, `FleetView`), what is to be booked (`Claim`) and what is (`Booking`), what came of it, and
all of it together (`Known`, `State`), as it passes from one store to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from baton.protos import scheduler_pb2 as pb

MAX_EPOCH = 2**31  # Lua's numbers are doubles; nobody gets near it


class PlacementLimits(Protocol):
    """How full workers may get. The scheduler's settings say so, and to routers its snapshots."""

    max_queued_prompt_tokens: int
    max_queue_factor: float
    handoff_min_tokens: int
    idle_decode_tokens: int


def same_limits(one: PlacementLimits, other: PlacementLimits) -> bool:
    """Return whether all limits of both are equal."""
    return all(getattr(one, name) == getattr(other, name) for name in PlacementLimits.__annotations__)


class PolicyOptions(Protocol):
    """The parts of a placement policy, by name; `PolicySettings` of the configuration tree is one."""

    filters: list[str]  # asked in this order
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
        """The parts of the policy that places."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at one request. A later try has a higher epoch and makes the earlier one void."""

    request_id: str
    epoch: int

    def __post_init__(self) -> None:
        if not self.request_id:
            raise ValueError("request_id is empty")
        if not 1 <= self.epoch < MAX_EPOCH:
            raise ValueError(f"epoch of request {self.request_id!r} is {self.epoch}: it counts from 1")


@dataclass(frozen=True, slots=True)
class Need:
    """What one attempt needs. `prefix_hashes` is for scorers that know which worker holds which blocks."""

    attempt: Attempt
    router_id: str
    prompt_tokens: int
    max_new_tokens: int
    prefix_hashes: tuple[bytes, ...] = ()
    exclude: frozenset[str] = frozenset()
    vllm_version: str = ""  # whose messages the router speaks; empty: any
    model_fingerprint: str = ""  # of the weights that began the answer; empty: any

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError(f"request {self.attempt.request_id!r} has no prompt tokens")
        if self.max_new_tokens < 0:
            raise ValueError(f"request {self.attempt.request_id!r}: max_new_tokens is {self.max_new_tokens}")


@dataclass(slots=True)
class Reserved:
    """What is booked on one worker; never below zero."""

    prompt_tokens: int = 0  # placed here and not yet read
    requests: int = 0  # placed here and not yet done here
    blocks: int = 0  # of the KV cache, for answers to be written here
    decoding: int = 0  # requests whose prompt is read and whose answer is written here

    @property
    def empty(self) -> bool:
        return not (self.prompt_tokens or self.requests or self.blocks or self.decoding)

    def add(self, other: Reserved) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.requests += other.requests
        self.blocks += other.blocks
        self.decoding += other.decoding

    def take(self, other: Reserved) -> None:
        """The opposite of `add`; what would be below zero is zero: two views may be of different moments."""
        self.prompt_tokens = max(0, self.prompt_tokens - other.prompt_tokens)
        self.requests = max(0, self.requests - other.requests)
        self.blocks = max(0, self.blocks - other.blocks)
        self.decoding = max(0, self.decoding - other.decoding)


@dataclass(slots=True)
class WorkerRecord:
    """One worker that is alive, as the store knows it."""

    identity: pb.WorkerIdentity
    state: pb.WorkerState
    load: pb.WorkerLoad | None  # None before its first heartbeat
    reserved: Reserved
    drain_asked: bool  # of its name, by an operator
    lease_left_s: float
    epoch: int = 0  # of its last message

    @property
    def worker_id(self) -> str:
        return self.identity.worker_id

    @property
    def role(self) -> pb.Role:
        return self.identity.role

    @property
    def capacity(self) -> pb.Capacity:
        return self.identity.capacity

    @property
    def held(self) -> bool:
        """It would take requests, but an operator drained its name."""
        return self.drain_asked and self.state != pb.WORKER_STATE_DRAINING

    @property
    def placeable(self) -> bool:
        """It takes new requests: its engine is loaded and nobody wants it gone."""
        ready = self.state == pb.WORKER_STATE_READY and not self.drain_asked
        return ready and self.identity.HasField("capacity")


@dataclass(frozen=True, slots=True)
class FleetView:
    """All workers alive at one moment, with what is booked on them."""

    workers: dict[str, WorkerRecord]
    live_attempts: int
    expired: int  # attempts whose lease had run out and that this reading removed
    generation: str = ""  # of the store; see `Store.merge`
    drained: frozenset[str] = frozenset()  # names on which an operator wants nothing placed, there or not


@dataclass(frozen=True, slots=True)
class Booking:
    """What one attempt holds.

    The reader (the prefill worker, or the decode worker where there is none) gets the prompt's tokens, the
    decode worker the blocks; each of them gets one request.
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
    def reader_id(self) -> str:
        return self.prefill_id or self.decode_id

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return (self.prefill_id, self.decode_id) if self.prefill_id else (self.decode_id,)

    def share(self, worker_id: str, *, read: bool = False) -> Reserved:
        """What it holds of `worker_id`; once the prompt is `read` no prompt tokens."""
        reads = worker_id == self.reader_id and not read
        writes = worker_id == self.decode_id
        return Reserved(
            prompt_tokens=self.prompt_tokens if reads else 0,
            requests=1 if reads or writes else 0,
            blocks=self.blocks if writes else 0,
            decoding=1 if writes and read else 0,
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A booking to be made, with the limits that must still hold when it is."""

    booking: Booking
    max_prompt_tokens: int  # on the reader; a reader with nothing queued takes any prompt
    max_requests: int  # on the decode worker
    max_blocks: int  # on the decode worker

    def __post_init__(self) -> None:
        if self.booking.blocks > self.max_blocks:
            raise ValueError(f"{self.booking.blocks} blocks never fit into {self.max_blocks}")

    @property
    def attempt(self) -> Attempt:
        return self.booking.attempt


class ReserveOutcome(Enum):
    """Values are what the script answers."""

    BOOKED = "booked"
    STALE = "stale"  # an attempt with this or a later epoch was placed; detail: that epoch
    GONE = "gone"  # a worker died, drains or was never there; detail: its id
    FULL = "full"  # a limit would be passed; detail: the worker's id


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """What came of a claim; nothing is booked unless BOOKED."""

    outcome: ReserveOutcome
    detail: str = ""
    expired: int = 0  # attempts swept on the way


@dataclass(frozen=True, slots=True)
class RouterReport:
    """What happened to attempts since the last report; applied in the order of the fields."""

    placed: tuple[Known, ...] = ()  # by the router itself, or told again
    prefilled: tuple[Attempt, ...] = ()
    finished: tuple[tuple[Attempt, pb.Finished], ...] = ()
    renewed: tuple[Attempt, ...] = ()
    shared: tuple[tuple[Attempt, int], ...] = ()  # with the KV blocks that are left of the booking

    @classmethod
    def from_wire(cls, request: pb.ReportRequest) -> RouterReport:
        """Raises ValueError for an event without request id or epoch."""
        return cls(
            placed=tuple(known_from_wire(booking, request.router_id) for booking in request.placed),
            prefilled=attempts_from_wire(request.prefilled),
            finished=tuple((attempt_from_wire(event.attempt), event) for event in request.finished),
            renewed=attempts_from_wire(request.renewed),
            shared=tuple((attempt_from_wire(event.attempt), event.blocks) for event in request.shared),
        )


@dataclass(slots=True)
class ReportResult:
    """What a report met."""

    lost: list[Attempt] = field(default_factory=list)  # renewed, but not booked (any more)
    fenced: list[Attempt] = field(default_factory=list)  # renewed or placed, but no longer theirs
    stale: int = 0  # events that carried an older epoch than the last one placed: ignored


@dataclass(frozen=True, slots=True)
class Deployment:
    """What every worker of a topic must serve, and the worker that said so first.

    vLLM's version and the model's revision may differ: while a deployment is upgraded both are there.
    """

    model: str
    worker_id: str

    @classmethod
    def of(cls, identity: pb.WorkerIdentity) -> Deployment:
        return cls(identity.model, identity.worker_id)

    def refusal(self, topic: str, newcomer: Deployment) -> str:
        """Why `newcomer` does not fit, in one line that names both sides; empty when it does."""
        if newcomer.model == self.model:
            return ""
        here = f"in topic {topic!r} (worker {self.worker_id})"
        return f"model {newcomer.model!r} here, {self.model!r} {here}: serve one model a topic"


@dataclass(frozen=True, slots=True)
class Heard:
    """The answer to a heartbeat."""

    known: bool
    drain: bool
    stale: bool = False  # it carried an older epoch than the worker's last message: ignored


@dataclass(frozen=True, slots=True)
class Known:
    """What a store knows of one request: its last attempt, and how far that one is.

    Merged by rising epoch, and within one epoch by rising stage: placed, live, live and read, over.
    `over` was said by its router. Without it, and without a booking, a lease ran out somewhere: another
    store may know better.
    """

    attempt: Attempt
    booking: Booking | None = None  # while it is live
    read: bool = False
    over: bool = False
    lease_s: float = 0.0  # left, while it is live

    @property
    def router_id(self) -> str:
        return self.booking.router_id if self.booking else ""


@dataclass(frozen=True, slots=True)
class State:
    """A store's whole state, to be merged into another's; what is booked follows from `requests`.

    Merging is commutative and idempotent: it does not matter who knew first.
    """

    generation: str = ""  # of the store that it was read from; empty: one that holds nothing yet
    workers: tuple[WorkerRecord, ...] = ()
    requests: tuple[Known, ...] = ()
    revision: int = 0  # of the store that it was read from; 0: it keeps none
    # Name -> how often an operator drained it or undid that: odd while it is drained. The higher count wins.
    drains: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class History:
    """Attempts under way and finished ones, for operators."""

    attempts: list[pb.LiveAttempt]
    handoffs: list[pb.PastHandoff]


def name_of(identity: pb.WorkerIdentity) -> str:
    """What stays the same in all lives of a worker."""
    return identity.name or identity.worker_id


def drained_of(drains: Mapping[str, int]) -> frozenset[str]:
    """The names that are drained now; see `State.drains`."""
    return frozenset(name for name, count in drains.items() if count % 2)


def held(attempts: Iterable[Known]) -> dict[str, Reserved]:
    """By worker id, what these attempts hold in all."""
    total: dict[str, Reserved] = {}
    for known in attempts:
        booking = known.booking
        if booking is None:
            continue
        for worker_id in booking.worker_ids:
            total.setdefault(worker_id, Reserved()).add(booking.share(worker_id, read=known.read))
    return total


def attempt_from_wire(message: pb.Attempt) -> Attempt:
    """Raises ValueError when the id or the epoch is missing."""
    return Attempt(message.request_id, message.epoch)


def attempts_from_wire(messages: Iterable[pb.Attempt]) -> tuple[Attempt, ...]:
    """Raises ValueError when an id or an epoch is missing."""
    return tuple(attempt_from_wire(message) for message in messages)


def attempt_to_wire(attempt: Attempt) -> pb.Attempt:
    return pb.Attempt(request_id=attempt.request_id, epoch=attempt.epoch)


def worker_to_wire(record: WorkerRecord) -> pb.Worker:
    """What a router needs to know of a worker that it was given."""
    identity = record.identity
    return pb.Worker(
        worker_id=identity.worker_id,
        address=identity.address,
        role=identity.role,
        model_fingerprint=identity.model_fingerprint,
    )


def known_from_wire(message: pb.Booking, router_id: str) -> Known:
    """Raises ValueError when it makes no sense."""
    attempt = attempt_from_wire(message.attempt)
    booking = Booking(
        attempt=attempt,
        router_id=router_id,
        prefill_id=message.prefill_worker_id,
        decode_id=message.decode_worker_id,
        prompt_tokens=message.prompt_tokens,
        blocks=message.blocks,
    )
    return Known(attempt, booking, read=message.read)


def known_to_wire(known: Known) -> pb.Booking:
    """Of a live attempt. Raises ValueError for another."""
    booking = known.booking
    if booking is None:
        raise ValueError(f"request {known.attempt.request_id!r} holds nothing")
    return pb.Booking(
        attempt=attempt_to_wire(known.attempt),
        prefill_worker_id=booking.prefill_id,
        decode_worker_id=booking.decode_id,
        prompt_tokens=booking.prompt_tokens,
        blocks=booking.blocks,
        read=known.read,
    )
