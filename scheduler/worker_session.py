"""Keep a worker registered with all schedulers: registrations, heartbeats, drains, and leaving.

The worker's process runs this (services/worker/process.py).
"""

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
from baton.scheduler.types import place_of
from baton.tasks import stop

HURRY_S = 0.1  # interval of heartbeats while the scheduler lacks much of the block log
RETRY_S = 0.5  # pause between attempts to register at start
CLOSE_S = 1.0  # time limit of deregistering
EPOCH_TRIES = 3  # registrations in a row that may be refused for a later epoch
# How long a scheduler's last answer about a drain stays valid after it has gone silent. Another scheduler
# that was started while Redis was down may not know of the drain.
WORD_S = 60.0

log = logging.getLogger(__name__)


class WorkerSession:
    """Keep a worker registered with all schedulers between `start` and `close`.

    Each registration and change of state takes the next epoch, so schedulers can refuse late messages.
    `draining` is set by `drain`, or when an operator drains the worker at any scheduler. A worker whose place
    was drained before it started does not drain: it continues to run without requests until an operator
    undrains it (`held`).

    Each scheduler keeps the workers in its own memory, and gets its own heartbeats with the part of the block
    log that it lacks. An unreachable scheduler does not delay the others.
    """

    def __init__(
        self,
        client: SchedulerClient,
        identity: pb.WorkerIdentity,
        load: Callable[[], pb.WorkerLoad],
        on_heartbeat: Callable[[pb.HeartbeatReply, float], None] | None = None,
    ) -> None:
        """Prepare the session; nothing is sent before `start`.

        `load` is called before each heartbeat. `on_heartbeat` gets the home scheduler's answers and their
        round trips in seconds. Both run in the event loop, must be quick and must not raise.
        """
        self.client = client
        self.identity = pb.WorkerIdentity()
        self.identity.CopyFrom(identity)
        self.load = load
        self._on_heartbeat = on_heartbeat
        self.state: pb.WorkerState = pb.WORKER_STATE_STARTING
        self.revision = 1  # revision of the registration that all schedulers should have
        self.heartbeat_s = 0.0  # from a scheduler's answer to a registration
        self.held: bool | None = None  # None: not known yet
        self.blocks: BlockLogs | None = None  # if the engine reports its cache
        self._lines = [_Line(self, address) for address in client.addresses]
        self._tasks: list[asyncio.Task[None]] = []
        self.draining = asyncio.Event()

    @property
    def worker_id(self) -> str:
        """The id, which is new at each start."""
        return self.identity.worker_id

    @property
    def place(self) -> str:
        """The name of its place, which stays the same."""
        return place_of(self.identity)

    @property
    def registered(self) -> bool:
        """Whether a scheduler has accepted the latest registration."""
        return any(line.registered for line in self._lines)

    async def start(self, wait_s: float) -> None:
        """Register as starting, and begin the heartbeats. One scheduler that accepts is enough.

        Raises SchedulerUnavailable after `wait_s` seconds, and Refused at once if any scheduler refuses.
        """
        deadline = time.monotonic() + wait_s
        while not self.registered:
            try:
                await self._register()
            except SchedulerUnavailable:
                if time.monotonic() + RETRY_S > deadline:
                    raise
                await asyncio.sleep(RETRY_S)
        # Learn whether the worker is held before anybody can ask it to drain.
        first = [line.heartbeat() for line in self._lines if line.registered]
        for problem in await asyncio.gather(*first, return_exceptions=True):
            if isinstance(problem, BaseException) and not isinstance(problem, SchedulerUnavailable):
                raise problem
        if any(line.drain_asked is not None for line in self._lines):
            self._hear_drain(asked=self._drain_asked)
        self._tasks = [keep(line.run, f"heartbeats to scheduler {line.address}") for line in self._lines]

    async def ready(self, capacity: pb.Capacity) -> None:
        """Announce that the engine is loaded, so that the worker gets requests. Raises Refused.

        An unreachable scheduler gets the registration when it is back.
        """
        self.identity.capacity.CopyFrom(capacity)
        if not self.draining.is_set():
            self.state = pb.WORKER_STATE_READY
        await self._register_anew()

    async def become(self, role: pb.Role) -> None:
        """Take another role for new placements. If that raises Refused, the old one stays."""
        was, self.identity.role = self.identity.role, role
        try:
            await self._register_anew()
        except Refused:
            self.identity.role = was
            self.revision += 1
            self.wake()
            raise

    def drain(self) -> None:
        """Tell the schedulers at once to place no more requests on this worker."""
        self.state = pb.WORKER_STATE_DRAINING
        self.identity.epoch += 1
        self.draining.set()
        self.wake()

    async def close(self) -> None:
        """Deregister. Does not raise: if a scheduler is unreachable, the registration expires."""
        for task in self._tasks:
            await stop(task)
        self._tasks = []
        self.identity.epoch += 1
        await asyncio.gather(*(line.leave() for line in self._lines))

    def wake(self) -> None:
        for line in self._lines:
            line.wake.set()

    def raise_epoch(self, last: int) -> None:
        """Continue above an epoch that an earlier process with this id used."""
        self.identity.epoch = max(self.identity.epoch, last)

    def heard(self, line: _Line, reply: pb.HeartbeatReply, took_s: float) -> None:
        if self._on_heartbeat is not None and line.address == self.client.home(self.worker_id):
            self._on_heartbeat(reply, took_s)
        if self._tasks:  # before that, `start` handles the replies
            self._hear_drain(asked=self._drain_asked)

    @property
    def _drain_asked(self) -> bool:
        return any(line.drain_asked for line in self._lines)

    async def _register_anew(self) -> None:
        self.revision += 1
        try:
            await self._register()
        except SchedulerUnavailable as error:
            log.warning("the new registration was not sent yet: %s", error)
        self.wake()

    async def _register(self) -> None:
        outcomes = await asyncio.gather(*(line.register() for line in self._lines), return_exceptions=True)
        problems = [one for one in outcomes if isinstance(one, BaseException)]
        for problem in problems:
            if not isinstance(problem, SchedulerUnavailable):
                raise problem
        if len(problems) == len(outcomes):
            raise problems[0]

    def _hear_drain(self, *, asked: bool) -> None:
        if self.held is None and asked:
            log.warning("this worker was drained: it takes no requests until `baton undrain %s`", self.place)
        elif self.held and not asked:
            log.info("no longer drained: it takes requests again")
        elif asked and not self.held and not self.draining.is_set():
            log.info("asked to drain")
            self.drain()
        self.held = asked and self.held is not False


class _Line:
    def __init__(self, session: WorkerSession, address: str) -> None:
        self._session = session
        self.address = address
        self.wake = asyncio.Event()
        self._accepted = 0  # the revision that the scheduler has; 0: it does not know the worker
        self._registrations = 0  # begun
        self._drain_asked = False
        self._heard_at: float | None = None  # time.monotonic()
        self._answers = True

    @property
    def registered(self) -> bool:
        """Whether the scheduler has the latest registration."""
        return self._accepted == self._session.revision

    @property
    def drain_asked(self) -> bool | None:
        """Whether the scheduler asks for a drain; None: unknown, or its last answer is too old."""
        if self._heard_at is None or time.monotonic() - self._heard_at > WORD_S:
            return None
        return self._drain_asked

    async def run(self) -> None:
        """Send heartbeats forever, registering first when needed."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self.wake.wait()
            self.wake.clear()
            try:
                if not self.registered:
                    await self.register()
                if self.registered:  # else another registration has begun, and will wake this line
                    await self.heartbeat()
                self._answers = True
            except Refused as error:
                log.warning("scheduler %s refuses this worker: %s", self.address, error)
            except SchedulerUnavailable as error:
                self._answers = False
                log.debug("no heartbeat: %s", error)

    async def register(self) -> None:
        """Send the latest registration. Raises Refused, SchedulerUnavailable."""
        session = self._session
        for _ in range(EPOCH_TRIES):
            revision = session.revision
            self._registrations += 1
            session.identity.epoch += 1
            try:
                reply = await session.client.register(session.identity, session.state, scheduler=self.address)
            except StaleWorker as error:  # an earlier process used this id: continue above its epoch
                session.raise_epoch(error.last)
                continue
            session.heartbeat_s = reply.heartbeat_s
            # A later registration, with the capacity, may be in flight. A heartbeat before it would report
            # "ready" without a capacity.
            self._accepted = max(self._accepted, revision)
            return
        raise Refused(
            f"another process registers as worker {session.worker_id} at the same time: give it another id"
        )

    async def heartbeat(self) -> None:
        """Send a heartbeat; register again if the scheduler has forgotten the worker."""
        session, registrations, began = self._session, self._registrations, time.monotonic()
        known = session.blocks.to(self.address) if session.blocks is not None else None
        blocks = known.message() if known is not None else None
        reply = await session.client.heartbeat(
            session.worker_id,
            session.state,
            session.load(),
            session.identity.epoch,
            blocks,
            scheduler=self.address,
        )
        if known is not None and reply.HasField("blocks"):
            known.heard(reply.blocks)
        if registrations != self._registrations:
            return  # a registration has begun since, so the answer is out of date
        if not reply.known:
            log.warning("scheduler %s has forgotten this worker: registering again", self.address)
            self._accepted = 0
            await self.register()
            return
        self._heard_at, self._drain_asked = time.monotonic(), reply.drain
        session.heard(self, reply, time.monotonic() - began)

    async def leave(self) -> None:
        if not self._accepted:
            return
        self._accepted = 0
        session = self._session
        with contextlib.suppress(SchedulerError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await session.client.deregister(
                    session.worker_id, session.identity.epoch, scheduler=self.address
                )

    @property
    def _pause_s(self) -> float:
        session = self._session
        behind = session.blocks is not None and session.blocks.to(self.address).behind
        return min(HURRY_S, session.heartbeat_s) if behind and self._answers else session.heartbeat_s
