"""Results of saves and loads: by rank on their way to the scheduler's side, then merged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.handoff.errors import HandoffError, named
from baton.protos.handoff_pb2 import Manifest


@dataclass(frozen=True)
class Problem:
    """Carry a HandoffError across processes."""

    name: str
    text: str

    @classmethod
    def of(cls, error: HandoffError) -> Problem:
        """Take an error's name and its text, on one line."""
        return cls(type(error).__name__, " ".join(str(error).split()))

    def to_error(self) -> HandoffError:
        """Rebuild the error, as a plain HandoffError if this version does not know its name."""
        return named(self.name)(self.text)

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True)
class ShardSave:
    """One rank's save, begun, done or failed. `shard` is a serialized handoff.Shard; empty with a problem."""

    request_id: str
    epoch: int
    rank: int
    shard: bytes = b""
    saved_at_s: float = 0.0  # CLOCK_MONOTONIC
    save_ms: float = 0.0  # time for its last part, which the decode side waits for
    problem: Problem | None = None
    begun: bool = False  # its first records can be pulled; the prompt is still being computed


@dataclass(frozen=True)
class Costs:
    """Times of one load, in milliseconds; of one rank, or of the slowest."""

    wait_ms: float = 0.0  # time from the request's arrival at the engine to the start of the pull
    move_ms: float = 0.0  # time until the bytes were within reach of this process
    check_ms: float = 0.0  # comparing digests
    load_ms: float = 0.0  # time to write into the engine's cache

    @classmethod
    def slowest(cls, costs: Sequence[Costs]) -> Costs:
        """Return the largest of each time."""
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
    early_bytes: int = 0  # part of `bytes` that came while the prompt was computed


@dataclass(frozen=True)
class Begun:
    """A prompt that is still being computed: its first records can be pulled, the others as they come."""

    request_id: str
    epoch: int
    manifest: Manifest


@dataclass(frozen=True)
class Saved:
    """A prompt's KV was kept for another worker (`manifest`), or could not be (`problem`)."""

    request_id: str
    epoch: int
    manifest: Manifest | None
    problem: Problem | None = None


@dataclass(frozen=True)
class Loaded:
    """The end of a handoff: its KV is in the engine's cache, or `problem` ends the request with an error.

    Zero blocks without a problem: nothing had to be pulled, because the prefix cache held it all.
    """

    request_id: str
    epoch: int
    transport: str = ""
    bytes: int = 0  # total of all ranks
    blocks: int = 0
    costs: Costs = field(default_factory=Costs)
    # Until the scheduler's side knows: from the end of the save if that was on this host, else from the
    # request's arrival.
    total_ms: float = 0.0
    problem: Problem | None = None
    early_bytes: int = 0  # part of `bytes` that came while the prompt was computed
    tokens: int = 0  # tokens whose KV was pulled


@dataclass(frozen=True)
class Staged:
    """The KV waiting on a worker to be pulled. Bytes are totals of all ranks."""

    handoffs: int = 0
    bytes: int = 0
    capacity: int = 0  # bytes
    overdue_s: float = 0.0  # age of the oldest beyond one lease


@dataclass(frozen=True)
class Reports:
    """Everything that began or ended since the last call of `take_reports`."""

    begun: tuple[Begun, ...] = ()
    saved: tuple[Saved, ...] = ()
    loaded: tuple[Loaded, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.begun or self.saved or self.loaded)
