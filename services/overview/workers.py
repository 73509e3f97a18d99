"""Workers as rows, with rates between two snapshots; gangs as units; changes of workers in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.enums import role_name, state_name
from baton.protos import scheduler_pb2 as pb

FORMING = "forming"


@dataclass(frozen=True, slots=True)
class Gang:
    """A gang, with the last worker heard from for each rank."""

    name: str
    size: int
    members: dict[int, pb.WorkerStatus]  # keyed by rank

    @property
    def first(self) -> pb.WorkerIdentity:
        return self.members[min(self.members)].identity

    @property
    def state(self) -> str:
        """Return `ready` if it takes requests, `drained`, `draining`, or `forming`."""
        members = self.members.values()
        if any(one.drained for one in members):
            return "drained"
        if any(one.state == pb.WORKER_STATE_DRAINING for one in members):
            return "draining"
        return FORMING if self.lacks else "ready"

    @property
    def lacks(self) -> str:
        """Return which ranks are not ready, and why; empty if all are."""
        found = []
        for rank in range(self.size):
            member = self.members.get(rank)
            if member is None:
                found.append(f"rank {rank} is missing")
            elif not member.identity.gang.life:
                found.append(f"rank {rank} waits for the others")
            elif member.state == pb.WORKER_STATE_STARTING:
                found.append(f"rank {rank} loads")
        lives = {one.identity.gang.life for one in self.members.values()}
        if not found and len(lives) > 1:
            found.append("its workers have not met each other")
        return ", ".join(found)

    @property
    def words(self) -> str:
        lacks = self.lacks
        return f"{self.name}: {self.state}{lacks and f' ({lacks})'}"

    @property
    def dummy_steps(self) -> int:
        return sum(one.load.dummy_steps for one in self.members.values())


def gangs_of(workers: Iterable[pb.WorkerStatus]) -> dict[str, Gang]:
    found: dict[str, Gang] = {}
    for one in sorted(workers, key=lambda worker: -worker.heartbeat_age_s):
        if one.identity.HasField("gang"):
            mine = one.identity.gang
            found.setdefault(mine.name, Gang(mine.name, mine.size, {})).members[mine.rank] = one
    return dict(sorted(found.items()))


def state_of(worker: pb.WorkerStatus, gang: Gang | None) -> str:
    """Return a worker's state: `forming` if only the rest of its gang is not ready."""
    if worker.drained:
        return "drained"
    if worker.state == pb.WORKER_STATE_READY and gang is not None and gang.state == FORMING:
        return FORMING
    return state_name(worker.state)


GONE_S = 30.0  # how long a worker that has left is still shown
GONE = "gone"
_MIB = 1 << 20


class Kept(NamedTuple):
    """The embeddings at an encode worker; counts of images, the last two since its start."""

    images: int
    mib: float
    computed: int
    found: int  # still kept when they were asked for


class Row(NamedTuple):
    """One worker. The live page gets it as a list."""

    id: str
    name: str
    role: str
    state: str
    running: int
    waiting: int
    slots: int
    kv_usage: float | None  # 0 to 1; None for an encode worker, which has no KV
    pinned_mib: float
    queued_tokens: int  # prompt tokens placed but not yet prefilled
    prefill_tokens_per_s: float | None  # or image tokens encoded
    output_tokens_per_s: float | None
    method: str
    acceptance: float | None  # first drafted token, last minute; None without drafts
    accepted_length: float | None  # output tokens per step with a draft
    alarm: bool
    silent_s: float  # time since the last heartbeat
    address: str
    gang: str  # its name and state; empty without one
    kept: Kept | None  # None unless it is an encode worker


COLUMNS = Row._fields


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over all workers; None if unknown."""

    prefill_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    acceptance: float | None = None  # first drafted tokens, last minute


@dataclass(slots=True)
class _Rates:
    at: float
    computed: int
    output: int
    prefill_per_s: float | None = None  # unknown before the second heartbeat
    output_per_s: float | None = None


class Workers:
    """The workers of the last snapshot, and those that left shortly before it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: dict[str, _Rates] = {}
        self._gone: dict[str, tuple[float, Row]] = {}  # id -> when it left, its last row
        self.rows: list[Row] = []
        self.sums = Sums()

    def update(self, workers: Iterable[pb.WorkerStatus], *, fresh: bool = True) -> None:
        """Update from a snapshot. A stale one, while no scheduler answers, gives no rates."""
        now = self._clock()
        before = [row for row in self.rows if row.state != GONE]
        workers = list(workers)
        # The counts of a stale snapshot have no known time, so no rate can start from them.
        self._rates = {
            one.identity.worker_id: self._rate(one.identity.worker_id, one.load.counts, now)
            for one in (workers if fresh else ())
        }
        gangs = gangs_of(workers)
        rows = {
            status.identity.worker_id: self._row(status, gangs.get(status.identity.gang.name))
            for status in workers
        }
        self._gone |= {row.id: (now, row._replace(state=GONE)) for row in before if row.id not in rows}
        self._gone = {
            worker_id: (since, row)
            for worker_id, (since, row) in self._gone.items()
            if worker_id not in rows and now - since < GONE_S
        }
        self.sums = self._sums(workers)
        self.rows = [*rows.values(), *(row for _, row in self._gone.values())]

    def _row(self, status: pb.WorkerStatus, gang: Gang | None) -> Row:
        identity, load = status.identity, status.load
        capacity, drafting = identity.capacity, load.drafting
        usable = max(1, capacity.num_blocks - 1)
        rates = self._rates.get(identity.worker_id)
        encodes = identity.role == pb.ROLE_ENCODE
        used = round(1 - load.free_blocks / usable, 3) if status.HasField("load") else 0.0
        return Row(
            id=identity.worker_id,
            name=identity.name or identity.worker_id,
            role=role_name(identity.role),
            state=state_of(status, gang),
            running=load.running,
            waiting=load.waiting,
            slots=capacity.max_num_seqs,
            kv_usage=None if encodes else used,
            pinned_mib=round(load.pinned_bytes / _MIB, 1),
            queued_tokens=status.reserved_prompt_tokens,
            prefill_tokens_per_s=_rounded(rates.prefill_per_s if rates else None),
            output_tokens_per_s=_rounded(rates.output_per_s if rates else None),
            method=capacity.speculative_method,
            acceptance=round(drafting.first_acceptance, 3) if drafting.drafts else None,
            accepted_length=round(drafting.mean_accepted_length, 2) if drafting.drafts else None,
            alarm=drafting.alarm,
            silent_s=round(status.heartbeat_age_s, 1),
            address=identity.address,
            gang=gang.words if gang is not None else "",
            kept=_kept(load.embeddings) if encodes else None,
        )

    def _rate(self, worker_id: str, counts: pb.EngineCounts, now: float) -> _Rates:
        computed, output = counts.computed_tokens, counts.output_tokens
        last = self._rates.get(worker_id) or _Rates(now, computed, output)
        took = now - last.at
        # Counts change only with heartbeats, a second apart: keep the last rate in between.
        if (computed, output) != (last.computed, last.output) and took > 0:
            return _Rates(
                now, computed, output, (computed - last.computed) / took, (output - last.output) / took
            )
        if took > 2.5:  # more than two heartbeats without a token
            last.prefill_per_s = last.output_per_s = 0.0
            last.at = now
        return last

    def _sums(self, workers: Sequence[pb.WorkerStatus]) -> Sums:
        rates = self._rates.values()
        encoders = {one.identity.worker_id for one in workers if one.identity.role == pb.ROLE_ENCODE}
        drafting = [status.load.drafting for status in workers]
        drafts = sum(one.drafts for one in drafting)
        accepted = sum(one.drafts * one.first_acceptance for one in drafting)
        return Sums(
            _sum(one.prefill_per_s for name, one in self._rates.items() if name not in encoders),
            _sum(one.output_per_s for one in rates),
            round(accepted / drafts, 3) if drafts else None,
        )


def _kept(one: pb.Embeddings) -> Kept:
    return Kept(one.images, round(one.bytes / _MIB, 1), one.computed, one.found)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 1) if known else None


_SHOWN = 5  # workers named in one line
# Severities, shown as colours.
INFO, WARNING, BAD = "info", "warning", "bad"

Rows = Mapping[str, Row]  # id -> row


def changes(before: Rows, now: Rows) -> Iterator[tuple[str, str]]:
    there = [row for row in now.values() if row.state != GONE]
    if came := [row for row in there if row.id not in before]:
        yield INFO, f"{_names(came)} registered"
    lost = [row for row in now.values() if row.state == GONE and row.id in before]
    if gone := [row for row in lost if before[row.id].state != GONE]:
        yield BAD, f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} gone"
    for row in there:
        if row.id in before:
            yield from _changed(before[row.id], row)


def _changed(before: Row, row: Row) -> Iterator[tuple[str, str]]:
    for column, one, other in (("role", before.role, row.role), ("state", before.state, row.state)):
        if one not in {other, GONE}:
            yield INFO, f"{row.name}: {column} {one} → {other}"
    if row.alarm != before.alarm:
        text = "accepts fewer drafts than it should" if row.alarm else "accepts drafts as it should again"
        yield BAD if row.alarm else INFO, f"{row.name} {text}"


def _names(rows: Sequence[Row]) -> str:
    more = len(rows) - _SHOWN
    return ", ".join(row.name for row in rows[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
