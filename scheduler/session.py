"""A worker's membership in a deployment: it registers, sends heartbeats, and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from baton.block_log import BlockLogs
from baton.keeping import keep
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import Refused, SchedulerError, SchedulerUnavailable, StaleWorker
from baton.scheduler.types import name_of
from baton.tasks import stop

HURRY_S = 0.1  # s to the next heartbeat while the scheduler lacks much of what the worker's cache holds
BLOCKS_S = 3.0  # s; the longest silence about an unchanged cache: schedulers forget after ten
RETRY_S = 0.5  # s between tries to register at start
CLOSE_S = 1.0  # s; for deregistering
EPOCH_TRIES = 3  # registrations in a row that may meet a later epoch

log = logging.getLogger(__name__)


class WorkerSession:
    """A registration between `start` and `close`. A worker that the scheduler forgot registers again.

    Each registration and change of state takes the next epoch: a late message of an older one is refused.
    `draining` is set when an operator asks for it, or by `drain`; from then on nothing new is placed here. A
    worker whose name was drained before it began does not drain: it stays, and nothing is placed on it until
    an operator undoes that (`held`).

    One of several schedulers gets all of it, and keeps it in their store. What the cache holds each of them
    hears for itself: the others in calls of their own, when there is something new, at most one for each
    heartbeat (more while they lack much).
    """

    def __init__(
        self,
        client: SchedulerClient,
        identity: pb.WorkerIdentity,
        load: Callable[[], pb.WorkerLoad],
        on_heartbeat: Callable[[pb.HeartbeatReply, float], None] | None = None,
    ) -> None:
        """Prepare the session; nothing is sent before `start`.

        `load` is called before each heartbeat, `on_heartbeat` gets the answer of a scheduler that knows the
        worker, and the seconds that it took; both in the event loop: they must be quick and must not raise.
        """
        self._client = client
        self._identity = pb.WorkerIdentity()
        self._identity.CopyFrom(identity)
        self._load = load
        self._on_heartbeat = on_heartbeat
        self._state: pb.WorkerState = pb.WORKER_STATE_STARTING
        self._registered = False
        self._heartbeat_s = 0.0  # the scheduler says it when the worker registers
        self.held: bool | None = None  # None: not known yet
        self.blocks: BlockLogs | None = None  # of a worker whose engine tells what its cache holds
        self._told_at: dict[
            str, float
        ] = {}  # by scheduler: time.monotonic() of the last word about the cache
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.draining = asyncio.Event()

    @property
    def worker_id(self) -> str:
        """Its id, another one each time it is started."""
        return self._identity.worker_id

    @property
    def name(self) -> str:
        """Its name, the same each time it is started."""
        return name_of(self._identity)

    @property
    def registered(self) -> bool:
        """Whether the scheduler knew this worker when it last answered."""
        return self._registered

    async def start(self, wait_s: float) -> None:
        """Register as starting and begin the heartbeats.

        Tries for `wait_s` seconds, then raises SchedulerUnavailable; raises Refused at once.
        """
        deadline = time.monotonic() + wait_s
        while not self._registered:
            try:
                await self._register()
            except SchedulerUnavailable:
                if time.monotonic() + RETRY_S > deadline:
                    raise
                await asyncio.sleep(RETRY_S)
        with contextlib.suppress(SchedulerUnavailable):
            await self._heartbeat()  # it must know whether it is held before anybody asks it to drain
        self._tasks = [keep(self._beat, "scheduler-heartbeats")]
        if self._client.schedulers > 1:
            self._tasks.append(keep(self._tell_others, "scheduler-blocks"))

    async def ready(self, capacity: pb.Capacity) -> None:
        """Take requests, as the engine is loaded. Raises Refused.

        With the scheduler away the registration follows when it is back.
        """
        self._identity.capacity.CopyFrom(capacity)
        if not self.draining.is_set():
            self._state = pb.WORKER_STATE_READY
        await self._register_anew()

    async def become(self, role: pb.Role) -> None:
        """Take another role: from now on other work is placed here. Raises Refused, and keeps the old one.

        With the scheduler away the registration follows when it is back.
        """
        was, self._identity.role = self._identity.role, role
        try:
            await self._register_anew()
        except Refused:
            self._identity.role = was
            raise

    def drain(self) -> None:
        """Tell the scheduler, with the next heartbeat, sent at once, to place nothing more here."""
        self._state = pb.WORKER_STATE_DRAINING
        self._identity.epoch += 1
        self.draining.set()
        self._wake.set()

    async def close(self) -> None:
        """Leave. Does not raise when the scheduler is away: the registration runs out by itself."""
        for task in self._tasks:
            await stop(task)
        self._tasks = []
        if self._registered:
            with contextlib.suppress(SchedulerError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._client.deregister(self.worker_id, self._identity.epoch + 1)
        self._registered = False

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(self._client.home(self.worker_id))):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if not self._registered:
                    await self._register()
                if self._registered:  # else a later registration is under way, and wakes this
                    await self._heartbeat()
            except Refused as error:
                log.warning("the scheduler refuses this worker: %s", error)
            except SchedulerUnavailable as error:
                log.debug("no heartbeat: %s", error)

    async def _tell_others(self) -> None:
        """Tell all schedulers but the one that gets the heartbeats what the cache holds, for ever."""
        while True:
            others = self._client.others(self._client.home(self.worker_id))
            await asyncio.gather(*(self._tell_blocks(one) for one in others))
            await asyncio.sleep(min(map(self._pause_s, others), default=self._heartbeat_s))

    def _pause_s(self, scheduler: str) -> float:
        """Return the seconds until this scheduler hears of the cache again."""
        behind = self.blocks is not None and self.blocks.to(scheduler).behind
        return min(HURRY_S, self._heartbeat_s) if behind else self._heartbeat_s

    async def _tell_blocks(self, scheduler: str) -> None:
        log_of_it = self.blocks.to(scheduler) if self.blocks is not None else None
        silent_s = time.monotonic() - self._told_at.get(scheduler, -BLOCKS_S)
        if log_of_it is None or not (log_of_it.news or silent_s >= BLOCKS_S):
            return
        try:
            known = await self._client.tell_blocks(self.worker_id, log_of_it.message(), scheduler)
        except (SchedulerUnavailable, Refused) as error:
            log.debug("not told what the cache holds: %s", error)
            return
        self._told_at[scheduler] = time.monotonic()
        log_of_it.heard(known)

    async def _register_anew(self) -> None:
        self._registered = False
        try:
            await self._register()
        except SchedulerUnavailable as error:
            log.warning("not registered yet as it is now: %s", error)
        self._wake.set()

    async def _register(self) -> None:
        for _ in range(EPOCH_TRIES):
            epoch = self._identity.epoch = self._identity.epoch + 1
            try:
                reply = await self._client.register(self._identity, self._state)
            except StaleWorker as error:  # of an earlier process with this id: go on above it
                self._identity.epoch = error.last
                continue
            self._heartbeat_s = reply.heartbeat_s
            # A later one, with a capacity, may be under way: a heartbeat before it would say ready without.
            self._registered = epoch == self._identity.epoch
            return
        raise Refused(
            f"another process registers as worker {self.worker_id} at the same time: name it otherwise"
        )

    async def _heartbeat(self) -> None:
        epoch, began = self._identity.epoch, time.monotonic()
        scheduler = self._client.home(self.worker_id)
        known = self.blocks.to(scheduler) if self.blocks is not None else None
        blocks = known.message() if known is not None else None
        reply = await self._client.heartbeat(
            self.worker_id, self._state, self._load(), epoch, blocks, scheduler=scheduler
        )
        if known is not None and reply.HasField("blocks"):
            known.heard(reply.blocks)
        if epoch != self._identity.epoch:
            return  # a registration overtook it: the answer is out of date
        if not reply.known:
            log.warning("the scheduler has forgotten this worker: registering again")
            self._registered = False
            await self._register()
            return
        if self._on_heartbeat is not None:
            self._on_heartbeat(reply, time.monotonic() - began)
        self._hear_drain(asked=reply.drain)

    def _hear_drain(self, *, asked: bool) -> None:
        if self.held is None and asked:
            log.warning("this worker was drained: it takes no requests until `baton undrain %s`", self.name)
        elif self.held and not asked:
            log.info("no longer drained: it takes requests again")
        elif asked and not self.held and not self.draining.is_set():
            log.info("asked to drain")
            self.drain()
        self.held = asked and self.held is not False
