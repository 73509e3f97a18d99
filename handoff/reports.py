"""Results of saves and loads: of individual ranks for the scheduler's side, and of all ranks for the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.handoff.errors import HandoffError, named
from baton.protos.handoff_pb2 import Manifest

Key = tuple[str, int]  # request id, epoch


@dataclass(frozen=True)
class Problem:
    """A HandoffError that can cross processes."""

    name: str
    text: str

    @classmethod
    def of(cls, error: HandoffError) -> Problem:
        return cls(type(error).__name__, " ".join(str(error).split()))

    def to_error(self) -> HandoffError:
        return named(self.name)(self.text)

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True)
class ShardSave:
    """One rank's save: begun, done or failed."""

    request_id: str
    epoch: int
    rank: int
    shard: bytes = b""  # serialized handoff.Shard; empty if there was a problem
    saved_at_s: float = 0.0  # CLOCK_MONOTONIC
    save_ms: float = 0.0  # time to save the last part
    problem: Problem | None = None
    begun: bool = False  # the first records can be pulled; the prompt is still being computed


@dataclass(frozen=True)
class Costs:
    """The times of one load: one rank's, or the slowest rank's."""

    wait_ms: float = 0.0  # from the request's arrival at the engine to the start of the pull
    move_ms: float = 0.0  # transfer
    check_ms: float = 0.0  # digests
    load_ms: float = 0.0  # writing into the engine's cache

    @classmethod
    def slowest(cls, costs: Sequence[Costs]) -> Costs:
        return cls(*(max(getattr(cost, name) for cost in costs) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class ShardLoad:
    """One rank's load: done or failed."""

    request_id: str
    epoch: int
    rank: int
    transport: str = ""
    bytes: int = 0
    blocks: int = 0
    costs: Costs = field(default_factory=Costs)
    problem: Problem | None = None
    early_bytes: int = 0  # part of `bytes` that came while the prompt was computed


@dataclass(frozen=True)
class Begun:
    """The first records of a prompt can be pulled; the rest follow while it is computed."""

    request_id: str
    epoch: int
    manifest: Manifest


@dataclass(frozen=True)
class Saved:
    """A prompt's KV was saved (`manifest`), or could not be (`problem`)."""

    request_id: str
    epoch: int
    manifest: Manifest | None
    problem: Problem | None = None


@dataclass(frozen=True)
class Loaded:
    """A load has ended; `problem` if it failed. Zero blocks and no problem: the prefix cache had all KV."""

    request_id: str
    epoch: int
    transport: str = ""
    bytes: int = 0  # total of all ranks
    blocks: int = 0
    costs: Costs = field(default_factory=Costs)
    # from the end of the save, or, if that was on another host, from when the prompt was complete
    # or the request arrived
    total_ms: float = 0.0
    problem: Problem | None = None
    early_bytes: int = 0  # part of `bytes` that came while the prompt was computed
    tokens: int = 0  # number of tokens whose KV was pulled


@dataclass(frozen=True)
class Staged:
    """The saved KV on a worker that has not been pulled yet."""

    handoffs: int = 0
    bytes: int = 0  # total of all ranks
    capacity: int = 0  # bytes, total of all ranks
    overdue_s: float = 0.0  # time by which the oldest save exceeds one lease


@dataclass(frozen=True)
class Reports:
    """The reports since the last call of `take_reports`."""

    begun: tuple[Begun, ...] = ()
    saved: tuple[Saved, ...] = ()
    loaded: tuple[Loaded, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.begun or self.saved or self.loaded)
