"""The figures of `baton top`, computed from the last two descriptions of the deployment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from baton.autoscale.histogram import SECONDS, quantile
from baton.protos import scheduler_pb2 as pb
from baton.services import roles

SIDES = ("prefill", "decode", "mixed")


@dataclass(frozen=True)
class Seen:
    """A description, and the time of its arrival (time.monotonic)."""

    at: float
    description: pb.Description


@dataclass(frozen=True)
class Row:
    worker_id: str
    side: str
    state: str
    running: int
    waiting: int
    kv: float | None  # share of the KV cache in use; None before its first heartbeat
    acceptance: float | None  # share of first drafted tokens accepted in the last minute
    alarm: bool
    tokens_s: float
    silent_s: float  # since its last heartbeat

    @property
    def load(self) -> int:
        return self.running + self.waiting


@dataclass(frozen=True)
class Side:
    name: str
    ready: int
    workers: int
    running: int
    waiting: int
    kv: float | None
    acceptance: float | None
    tokens_s: float


@dataclass(frozen=True)
class Traffic:
    """The routers' work between two descriptions: rates per second, times in seconds, None if unknown."""

    requests_s: float
    tokens_s: float
    waiting: int
    ttft: tuple[float, float] | None  # p50, p99
    itl: tuple[float, float] | None  # p50, p99 of the mean gaps of ended requests


Sort = Callable[[Row], object]
# In the order of the key `s`; each puts the most notable workers first.
SORTS: Mapping[str, Sort] = {
    "name": attrgetter("worker_id"),
    "load": lambda row: (-row.load, row.worker_id),
    "KV": lambda row: (-(row.kv or 0.0), row.worker_id),
    "acceptance": lambda row: (row.acceptance is None, row.acceptance or 0.0, row.worker_id),
    "tokens/s": lambda row: (-row.tokens_s, row.worker_id),
    "silence": lambda row: (-row.silent_s, row.worker_id),
}


def rows(now: Seen, before: Seen | None) -> list[Row]:
    old = {} if before is None else {w.identity.worker_id: w for w in before.description.workers}
    passed_s = 0.0 if before is None else now.at - before.at
    return [_row(worker, old.get(worker.identity.worker_id), passed_s) for worker in now.description.workers]


def chosen(of: Iterable[Row], words: str, sort: str) -> list[Row]:
    """Return the rows that contain every word, sorted."""
    wanted = words.lower().split()
    found = [
        row for row in of if all(word in f"{row.worker_id} {row.side} {row.state}".lower() for word in wanted)
    ]
    return sorted(found, key=SORTS[sort])  # type: ignore[arg-type]


def sides(of: Sequence[Row]) -> list[Side]:
    return [_side(name, mine) for name in SIDES if (mine := [row for row in of if row.side == name])]


def traffic(now: Seen, before: Seen | None) -> Traffic:
    """Return the routers' work since `before`; a new router counts from its second description."""
    old = {} if before is None else {one.router_id: one.load for one in before.description.routers}
    routers = [(one.load, old[one.router_id]) for one in now.description.routers if one.router_id in old]
    passed_s = max(1e-9, now.at - before.at) if before else 1.0
    return Traffic(
        requests_s=sum(new.over - was.over for new, was in routers) / passed_s,
        tokens_s=sum(new.output_tokens - was.output_tokens for new, was in routers) / passed_s,
        waiting=sum(one.load.waiting for one in now.description.routers),
        ttft=_quantiles([_more(new.first_token, was.first_token) for new, was in routers]),
        itl=_quantiles([_more(new.gap, was.gap) for new, was in routers]),
    )


def state_of(worker: pb.WorkerStatus) -> str:
    state = pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
    return "drained" if worker.drained else state


def _row(worker: pb.WorkerStatus, old: pb.WorkerStatus | None, passed_s: float) -> Row:
    load, blocks = worker.load, worker.identity.capacity.num_blocks
    drafting = load.drafting if load.HasField("drafting") else None
    tokens = load.counts.output_tokens - old.load.counts.output_tokens if old is not None else 0
    return Row(
        worker_id=worker.identity.worker_id,
        side=roles.name_of(worker.identity.role),
        state=state_of(worker),
        running=load.running,
        waiting=load.waiting,
        kv=1 - load.free_blocks / blocks if blocks and worker.HasField("load") else None,
        acceptance=drafting.first_acceptance if drafting is not None and drafting.drafts else None,
        alarm=drafting is not None and drafting.alarm,
        tokens_s=max(0, tokens) / passed_s if passed_s > 0 else 0.0,
        silent_s=worker.heartbeat_age_s,
    )


def _side(name: str, of: Sequence[Row]) -> Side:
    return Side(
        name=name,
        ready=sum(row.state == "ready" for row in of),
        workers=len(of),
        running=sum(row.running for row in of),
        waiting=sum(row.waiting for row in of),
        kv=_mean(row.kv for row in of),
        acceptance=_mean(row.acceptance for row in of),
        tokens_s=sum(row.tokens_s for row in of),
    )


def _mean(of: Iterable[float | None]) -> float | None:
    known = [value for value in of if value is not None]
    return sum(known) / len(known) if known else None


def _more(new: Sequence[int], old: Sequence[int]) -> list[int]:
    """Return the increase of a histogram's counts."""
    if len(old) != len(new):
        return list(new)
    return [max(0, one - was) for one, was in zip(new, old, strict=True)]


def _quantiles(counts: Sequence[Sequence[int]]) -> tuple[float, float] | None:
    """Return the p50 and p99 of all histograms together in seconds, or None if they are empty."""
    filled = [one for one in counts if len(one) == len(SECONDS) + 1]
    total = [sum(column) for column in zip(*filled, strict=True)]
    half, most = quantile(total, SECONDS, 0.5), quantile(total, SECONDS, 0.99)
    return None if half is None or most is None else (half, most)
