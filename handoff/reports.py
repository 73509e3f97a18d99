"""What became of saves and loads: by rank on the way to the scheduler's side, then merged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.handoff.errors import HandoffError, named
from baton.protos.handoff_pb2 import Manifest


@dataclass(frozen=True)
class Problem:
    """A HandoffError that crosses processes."""

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
    """One rank's save. `shard` is a serialized handoff.Shard; empty with a problem."""

    request_id: str
    epoch: int
    rank: int
    shard: bytes = b""
    saved_at_s: float = 0.0  # CLOCK_MONOTONIC
    save_ms: float = 0.0
    problem: Problem | None = None


@dataclass(frozen=True)
class Costs:
    """Of one load. Milliseconds; a rank's, or the slowest rank's."""

    wait_ms: float = 0.0  # from the request's arrival at the engine to the pull's begin
    move_ms: float = 0.0  # until the bytes were in this process' reach
    check_ms: float = 0.0  # digests
    load_ms: float = 0.0  # into the engine's cache

    @classmethod
    def slowest(cls, costs: Sequence[Costs]) -> Costs:
        return cls(*(max(getattr(cost, name) for cost in costs) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class ShardLoad:
    """One rank's load, done or failed."""

    request_id: str
    epoch: int
    rank: int
    transport: str = ""
    bytes: int = 0
    blocks: int = 0
    costs: Costs = field(default_factory=Costs)
    problem: Problem | None = None


@dataclass(frozen=True)
class Saved:
    """A prompt's KV was kept for another worker (`manifest`), or could not be (`problem`)."""

    request_id: str
    epoch: int
    manifest: Manifest | None
    problem: Problem | None = None


@dataclass(frozen=True)
class Loaded:
    """A handoff ended: the KV is in the engine's cache, or `problem` says why the request ends with an error.

    Zero blocks without a problem: nothing had to be pulled, for the prefix cache held it all.
    """

    request_id: str
    epoch: int
    transport: str = ""
    bytes: int = 0  # all ranks'
    blocks: int = 0
    costs: Costs = field(default_factory=Costs)
    total_ms: float = (
        0.0  # from the save's end, on one host, else from the arrival, to the scheduler's knowing
    )
    problem: Problem | None = None


@dataclass(frozen=True)
class Staged:
    """What waits on a worker to be pulled. Bytes are those of all ranks."""

    handoffs: int = 0
    bytes: int = 0
    capacity: int = 0  # bytes


@dataclass(frozen=True)
class Reports:
    """Since the last time somebody asked."""

    saved: tuple[Saved, ...] = ()
    loaded: tuple[Loaded, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.saved or self.loaded)
