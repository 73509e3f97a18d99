"""A store that others share (Redis), and this process's memory for the time that it is away.

While the shared store answers, it decides; memory follows: at once with the calls of this process, and
twice a second with the changes since, which other schedulers made. When a call fails, memory decides;
following includes a write, as a full store can still be read. Memory is written back, with what is over by
now, before the shared store decides again: when that takes a small write quickly. A store that has lost
nothing, as one that only stood still for a second, gets what happened since; another one all that is known.
A claim that wants the store (`Claim.with_store`) is never decided by memory: another scheduler may have it.
A store that came back empty without having been missed is known by its generation, and filled the same way.

The start does without a store that is away, too: workers register again, and routers report what they hold.
Only where waiting cannot help, with a wrong password or name, the start fails: nobody would notice it later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import StoreRefuses, StoreUnavailable
from baton.scheduler.store.base import Store
from baton.scheduler.store.memory import MemoryStore
from baton.scheduler.types import (
    Claim,
    FleetView,
    Heard,
    History,
    Known,
    ReportResult,
    Reserved,
    ReserveOutcome,
    ReserveResult,
    RouterReport,
    State,
    Told,
)

QUICK_S = 0.25  # s; a store that needs longer for a small write is not back
FOLLOW_REQUESTS = 128  # in one piece of what is followed: no other call is answered meanwhile
AWAY = "the store is away, going on from memory"  # logged once each time; a benchmark counts it

T = TypeVar("T")

log = logging.getLogger(__name__)


class ResilientStore(Store):
    """A shared store with a memory behind it. `problem` says why memory decides, while it does.

    Raises StoreRefuses in `open`, nothing elsewhere.
    """

    def __init__(self, shared: Store, memory: MemoryStore) -> None:
        self.name = shared.name
        self._shared = shared
        self._memory = memory
        self._revision = 0  # of the shared store; memory knows what it knew then
        # Memory's, the last two times that the shared store was well and had all of it: what one scheduler
        # wrote in a store's last moment, another one has not followed.
        self._well = 0, 0
        self._decided = asyncio.Event()  # clear for the moment in which it changes which of them decides
        self._decided.set()

    async def open(self) -> None:
        try:
            state = await self._shared.export()
            self.generation = await self._shared.merge(State())
        except StoreRefuses:
            raise
        except StoreUnavailable as error:
            log.error("beginning without the store, and with an empty memory: %s", error)  # noqa: TRY400
            self.problem = str(error)
            return
        await self._follow(state)

    async def tend(self) -> None:
        try:
            if self.problem:
                await self._come_back()
                return
            state = await self._shared.export(self._revision)
            self._check(state.generation)
            if not self.problem:
                await self._follow(state)
                await self._shared.merge(State())  # nothing, but it is a write: a full store still reads
                if not self.problem:
                    self._well = self._well[1], self._memory.revision
        except StoreUnavailable as error:
            self._lose(error)

    async def view(self) -> FleetView:
        view = await self._ask(self._shared.view)
        if view is not None:
            self._check(view.generation)
        return await self._memory.view() if view is None or self.problem else view

    async def reserve(self, claim: Claim, lease_s: float) -> ReserveResult:
        known = self._memory.holds(claim.booking)
        result = await self._ask(lambda: self._shared.reserve(claim, lease_s))
        if result is None and claim.with_store:
            return ReserveResult(ReserveOutcome.AWAY)
        if result is None:
            mine = await self._memory.reserve(claim, lease_s)
            # Booked there, and followed from there, while this call's reply was lost.
            booked = mine.outcome is ReserveOutcome.STALE and not known and self._memory.holds(claim.booking)
            return replace(mine, outcome=ReserveOutcome.BOOKED, detail="") if booked else mine
        if result.outcome is ReserveOutcome.BOOKED:
            followed = Known(claim.attempt, claim.booking, lease_s=lease_s)
            await self._memory.merge(State(requests=(followed,)))
        return result

    async def report(self, report: RouterReport, lease_s: float) -> ReportResult:
        result = await self._ask(lambda: self._shared.report(report, lease_s))
        mine = await self._memory.report(report, lease_s)
        return mine if result is None else result

    async def register(self, identity: pb.WorkerIdentity, state: pb.WorkerState, lease_s: float) -> str:
        refusal = await self._ask(lambda: self._shared.register(identity, state, lease_s))
        if refusal:
            return refusal
        mine = await self._memory.register(identity, state, lease_s)
        return mine if refusal is None else refusal

    async def heartbeat(
        self, worker_id: str, state: pb.WorkerState, load: pb.WorkerLoad, lease_s: float, epoch: int = 0
    ) -> Heard:
        heard = await self._ask(lambda: self._shared.heartbeat(worker_id, state, load, lease_s, epoch))
        mine = await self._memory.heartbeat(worker_id, state, load, lease_s, epoch)
        return mine if heard is None else heard

    async def deregister(self, worker_id: str, epoch: int = 0) -> bool:
        done = await self._ask(lambda: self._shared.deregister(worker_id, epoch))
        mine = await self._memory.deregister(worker_id, epoch)
        return mine if done is None else done

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        done = await self._ask(lambda: self._shared.drain(name, undo=undo))
        mine = await self._memory.drain(name, undo=undo)
        return mine if done is None else done

    async def take_turn(self, what: str, for_s: float) -> bool:
        mine = await self._memory.take_turn(what, for_s)
        theirs = await self._ask(lambda: self._shared.take_turn(what, for_s)) if mine else False
        return mine if theirs is None else theirs

    # Without the shared store nobody decides: each scheduler's memory would have a decider of its own.

    async def tell(self, kind: str, who: str, message: bytes, lease_s: float) -> bytes:
        return await self._ask(lambda: self._shared.tell(kind, who, message, lease_s)) or b""

    async def lead(self, who: str, for_s: float) -> int:
        return await self._ask(lambda: self._shared.lead(who, for_s)) or 0

    async def told(self) -> Told:
        return await self._ask(self._shared.told) or Told()

    async def order(self, fence: int, orders: Mapping[str, bytes]) -> bool:
        return await self._ask(lambda: self._shared.order(fence, orders)) or False

    async def history(self, limit: int) -> History:
        history = await self._ask(lambda: self._shared.history(limit))
        return await self._memory.history(limit) if history is None else history

    async def export(self, since: int = 0) -> State:
        """Return what memory knows: it is near, and hardly behind."""
        return replace(await self._memory.export(since), generation=self.generation)

    async def merge(self, state: State) -> str:
        await self._ask(lambda: self._shared.merge(state))
        await self._memory.merge(state)
        return self.generation

    async def left(self) -> tuple[str, ...]:
        return await self._memory.left()

    async def booked_by(self, router_id: str) -> dict[str, Reserved]:
        return await self._memory.booked_by(router_id)

    async def close(self) -> None:
        await self._shared.close()
        await self._memory.close()

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Return the shared store's answer; None while it is away."""
        await self._decided.wait()  # as long as a write-back takes at most: each of its calls has a deadline
        if self.problem:
            return None
        try:
            return await call()
        except StoreUnavailable as error:
            self._lose(error)
            return None

    async def _come_back(self) -> None:
        """Return to the shared store if one small write takes little time.

        The time of an export says nothing of the store: it grows with what other schedulers did meanwhile.
        Bulk calls go in pieces, each with a deadline of its own. Raises StoreUnavailable when the store is
        still away.
        """
        began = time.monotonic()
        generation = await self._shared.merge(State())
        if time.monotonic() - began >= QUICK_S:
            return
        kept = generation == self.generation
        if kept:  # also its newest changes? It may have begun again with what it had written to disk before
            kept = (await self._shared.export(self._revision)).revision >= self._revision
        await self._write_back(self._well[0] if kept else 0)

    async def _write_back(self, since: int) -> None:
        """Merge memory into the shared store, past requests since that revision, and let that decide.

        Raises StoreUnavailable when it could not be finished: memory goes on deciding.
        """
        # Most of it while requests go on: at 500 a second 30,000 are known that are over.
        most = await self._exported(since)
        there = await self._shared.merge(most)
        self._decided.clear()
        before = self.generation
        try:
            self.generation = await self._shared.merge(await self._exported(most.revision))
            if self.generation != there:
                raise StoreUnavailable(f"{self.name} has lost what was written")
            self.problem = ""
            if self.generation != before:
                self._revision = 0  # it counts anew
        finally:
            self._decided.set()
        log.warning("the store at %s is back, and has what happened meanwhile", self.name)

    async def _follow(self, state: State) -> None:
        """Merge into memory in pieces: at 1,000 placements a second as many have changed each time."""
        await self._memory.merge(replace(state, requests=()))
        for begin in range(0, len(state.requests), FOLLOW_REQUESTS):
            await asyncio.sleep(0)  # for the calls that came meanwhile
            await self._memory.merge(State(requests=state.requests[begin : begin + FOLLOW_REQUESTS]))
        self._revision = state.revision

    async def _exported(self, since: int) -> State:
        # Without a generation: an empty store takes a new one, by which other schedulers see what happened.
        return replace(await self._memory.export(since), generation="")

    def _check(self, generation: str) -> None:
        """Notice a store that came back empty: it answers all calls, and knows nothing."""
        if generation != self.generation and not self.problem:
            self._lose(StoreUnavailable(f"{self.name} has lost what it held"))

    def _lose(self, error: StoreUnavailable) -> None:
        if not self.problem:
            log.warning("%s: %s", AWAY, error)
        self.problem = str(error)
