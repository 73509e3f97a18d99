"""Join the workers of a gang: they meet before their engines load, wake each other, and end together.

The worker of rank 0 leads: it serves `Gang.Join`, and every other worker keeps one call to it. The link is up
before any engine loads, because an engine would wait for a missing one for many minutes. A member that leaves
before all have met is awaited again. Later, the gang ends when one link ends, unless all members are drained.
Too long a silence also ends the gang; once all members serve, a shorter silence suffices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from baton import rpc
from baton.protos import gang_pb2, gang_pb2_grpc
from baton.security.names import Role
from baton.services.errors import StartError
from baton.tasks import patiently, spawn, stop

logger = logging.getLogger(__name__)

REDIAL_S = 0.2
SIGN_S = 1.0  # longest time between two messages to a member or the leader
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Silence:
    """The seconds without a message after which the other end counts as dead."""

    loading_s: float  # until all members serve: an event loop may be held up while an engine loads
    serving_s: float


@dataclass(frozen=True)
class Seat:
    """A worker's place in a gang. `facts` must be equal in all members of the gang."""

    gang: str
    rank: int
    size: int
    worker_id: str
    facts: Mapping[str, str]

    def join(self) -> gang_pb2.Join:
        return gang_pb2.Join(
            worker_id=self.worker_id, gang=self.gang, rank=self.rank, size=self.size, facts=self.facts
        )

    def objection(self, other: gang_pb2.Join) -> str:
        """Explain why this worker's gang cannot have that member; empty if it can."""
        if (other.gang, other.size) != (self.gang, self.size):
            return f"this is gang {self.gang} of {self.size}, not gang {other.gang} of {other.size}"
        if not 0 < other.rank < self.size:
            return f"rank {other.rank} is not one of 1 to {self.size - 1}"
        for name in sorted({*self.facts, *other.facts}):
            mine, its = self.facts.get(name), other.facts.get(name)
            if mine != its:
                return f"{name} is {its!r} at rank {other.rank} and {mine!r} at rank 0: start all alike"
        return ""


class _Outbox:
    """The messages still to be sent: only the latest `ring` and `stage`, which replace earlier ones."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._filled = asyncio.Event()

    def put(self, **messages: int) -> None:
        if "ring" in messages:  # a ring of an earlier wave may be put later
            messages["ring"] = max(messages["ring"], self._waiting.get("ring", 0))
        self._waiting |= messages
        self._filled.set()

    def wake(self) -> None:
        """Let `next` return early, so that its caller checks whether the link has ended."""
        self._filled.set()

    async def next(self, timeout_s: float) -> dict[str, int]:
        """Return the next message as one field and its value; empty if there is none in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._filled.wait()
        field = (
            "ring" if "ring" in self._waiting else next(iter(self._waiting), "")
        )  # a wave ends before a drain
        message = {field: self._waiting.pop(field)} if field else {}
        if not self._waiting:
            self._filled.clear()
        return message


class GangLink:
    """One worker's end of the link.

    lost: resolves once, with the reason, if the gang ends before all members are drained
    draining, drained: set when a member is draining, and when all are drained
    """

    def __init__(self, seat: Seat, silence: Silence, rung: Callable[[int], None]) -> None:
        """Prepare the link. rung: called in the loop with the wave of each ring from another member."""
        self.seat = seat
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.draining, self.drained = asyncio.Event(), asyncio.Event()
        self._silence = silence
        self._serves = False  # whether all members serve
        self._rung = rung

    @property
    def missing(self) -> str:
        """The ranks that have not joined, as far as this end knows: `1, 3`; empty once all have met."""
        return ""

    async def meet(self, timeout_s: float) -> gang_pb2.World:
        """Wait until all members have joined. Raises StartError if they do not join in time, or cannot."""
        raise NotImplementedError

    def ring(self, wave: int) -> None:
        """Tell all other members that this one has work in the wave."""
        raise NotImplementedError

    def tell(self, stage: gang_pb2.Stage) -> None:
        """Tell the gang that this member serves, drains or is drained."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leave the gang, which ends it."""
        raise NotImplementedError

    def _hear(self, stage: gang_pb2.Stage) -> None:
        if stage == gang_pb2.STAGE_SERVING:
            self._serves = True
            return
        self.draining.set()
        if stage == gang_pb2.STAGE_DRAINED:
            self.drained.set()

    @property
    def _silence_s(self) -> float:
        return self._silence.serving_s if self._serves else self._silence.loading_s

    @property
    def _sign_s(self) -> float:
        return min(SIGN_S, self._silence.serving_s / 3)

    def _lose(self, why: str) -> None:
        if not self.lost.done() and not self.drained.is_set():
            logger.error("gang %s is over: %s", self.seat.gang, why)
            self.lost.set_result(why)


class Leader(GangLink, gang_pb2_grpc.GangServicer):
    """The link at rank 0: the service that the other members join."""

    def __init__(
        self,
        seat: Seat,
        silence: Silence,
        rung: Callable[[int], None],
        open_world: Callable[[], gang_pb2.World],
    ) -> None:
        """open_world: opens the store at which the engines meet; called once, when all members are there."""
        super().__init__(seat, silence, rung)
        self._open_world = open_world
        self._members: dict[int, _Outbox] = {}
        self._stages: dict[int, gang_pb2.Stage] = {}  # keyed by rank, as far as ranks have reported them
        self._world: asyncio.Future[gang_pb2.World] = asyncio.get_running_loop().create_future()

    @property
    def missing(self) -> str:
        if self._world.done():
            return ""
        return ", ".join(str(rank) for rank in range(1, self.seat.size) if rank not in self._members)

    async def meet(self, timeout_s: float) -> gang_pb2.World:
        self._complete()
        try:
            return await asyncio.wait_for(asyncio.shield(self._world), timeout_s)
        except TimeoutError:
            raise StartError(
                f"gang {self.seat.gang}: rank {self.missing} of {self.seat.size} did not join within "
                f"{timeout_s:g} s; see why it did not start, or start it"
            ) from None

    def ring(self, wave: int) -> None:
        self._ring_others(0, wave)

    def tell(self, stage: gang_pb2.Stage) -> None:
        self._hear_from(0, stage)

    async def close(self) -> None:
        self._lose("rank 0 leaves")

    async def Join(self, requests: object, context: Any) -> None:
        del requests
        member = await self._admitted(context)
        outbox = self._members[member.rank] = _Outbox()
        logger.info("gang %s: rank %d joined (%s)", self.seat.gang, member.rank, member.worker_id)
        reading = asyncio.create_task(self._read(member.rank, context))
        reading.add_done_callback(lambda _: outbox.wake())
        self._world.add_done_callback(lambda _: outbox.wake())
        try:
            self._complete()
            # Until all members have joined, empty messages show that this end is alive.
            while not self._world.done() and not reading.done():
                await context.write(gang_pb2.FromLeader())
                await outbox.next(self._sign_s)
            if self._world.done():
                await context.write(gang_pb2.FromLeader(world=self._world.result()))
            while not reading.done() and not self.lost.done():
                message = await outbox.next(self._sign_s)
                await context.write(gang_pb2.FromLeader(**message))  # type: ignore[arg-type]
        finally:
            await stop(reading)
            del self._members[member.rank]
            if self._world.done():
                self._lose(f"rank {member.rank} ({member.worker_id}) ended or is silent")
        await context.abort(
            grpc.StatusCode.ABORTED, self.lost.result() if self.lost.done() else "you were silent"
        )

    async def _admitted(self, context: Any) -> gang_pb2.Join:
        first = None
        with contextlib.suppress(TimeoutError):
            first = await asyncio.wait_for(context.read(), self._silence_s)
        if not isinstance(first, gang_pb2.FromMember) or not first.HasField("join"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Join")
            raise AssertionError("abort raises")
        member = first.join
        if why := self.seat.objection(member):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        if self._world.done() or member.rank in self._members:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"rank {member.rank} of gang {self.seat.gang} is here already: if another gang is called "
                f"{self.seat.gang}, too, give each a name of its own with --gang",
            )
        return member

    def _complete(self) -> None:
        if len(self._members) == self.seat.size - 1 and not self._world.done():
            self._world.set_result(self._open_world())

    async def _read(self, rank: int, context: Any) -> None:
        with contextlib.suppress(TimeoutError, grpc.RpcError):
            while (message := await patiently(context.read(), self._silence_s)) is not _EOF:
                if message.HasField("ring"):
                    self._ring_others(rank, message.ring)
                    self._rung(message.ring)
                elif message.HasField("stage"):
                    self._hear_from(rank, message.stage)

    def _ring_others(self, rank: int, wave: int) -> None:
        for other, outbox in self._members.items():
            if other != rank:
                outbox.put(ring=wave)

    def _hear_from(self, rank: int, stage: gang_pb2.Stage) -> None:
        self._stages[rank] = stage
        stages, serving = self._stages.values(), gang_pb2.STAGE_SERVING
        everybody = len(stages) == self.seat.size
        if not everybody and all(one == serving for one in stages):
            return  # the others are still loading
        gangs = gang_pb2.STAGE_DRAINING if any(one != serving for one in stages) else serving
        if everybody and all(one == gang_pb2.STAGE_DRAINED for one in stages):
            gangs = gang_pb2.STAGE_DRAINED
        for outbox in self._members.values():
            outbox.put(stage=gangs)
        self._hear(gangs)

    def _lose(self, why: str) -> None:
        super()._lose(why)
        for outbox in self._members.values():
            outbox.wake()


class Member(GangLink):
    """The link at another rank: a call to the leader."""

    def __init__(
        self, seat: Seat, silence: Silence, rung: Callable[[int], None], find: Callable[[], Awaitable[str]]
    ) -> None:
        """find: returns the leader's address, or an empty text while it is unknown."""
        super().__init__(seat, silence, rung)
        self._find = find
        self._outbox = _Outbox()
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None

    async def meet(self, timeout_s: float) -> gang_pb2.World:
        problem = "the scheduler knows no leader"
        deadline = asyncio.get_running_loop().time() + timeout_s
        pause_s = REDIAL_S
        while (left_s := deadline - asyncio.get_running_loop().time()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    if address := await self._find():
                        return await self._join(address)
            except TimeoutError:
                problem = "not all members joined"
                break
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED):
                    raise StartError(
                        f"gang {self.seat.gang} refuses this worker: {error.details()}"
                    ) from None
                problem = error.details() or error.code().name
            except ConnectionError as error:
                problem = str(error)
            await self.close()
            await asyncio.sleep(pause_s)
            pause_s = min(1.0, 1.5 * pause_s)
        await self.close()
        raise StartError(
            f"gang {self.seat.gang}: rank {self.seat.rank} did not meet the others within {timeout_s:g} s: "
            f"{problem}"
        )

    def ring(self, wave: int) -> None:
        self._outbox.put(ring=wave)

    def tell(self, stage: gang_pb2.Stage) -> None:
        self._outbox.put(stage=stage)

    async def close(self) -> None:
        if self._task is not None:
            await stop(self._task)
        if self._channel is not None:
            await self._channel.close(None)
        self._task = self._channel = None

    async def _join(self, address: str) -> gang_pb2.World:
        self._channel = rpc.aio_channel(address, Role.WORKER)
        call = gang_pb2_grpc.GangStub(self._channel).Join()  # type: ignore[no-untyped-call]
        await call.write(gang_pb2.FromMember(join=self.seat.join()))
        world: asyncio.Future[gang_pb2.World] = asyncio.get_running_loop().create_future()
        self._task = spawn(self._live(call, world), f"the link to the leader of gang {self.seat.gang}")
        return await world

    async def _live(self, call: Any, world: asyncio.Future[gang_pb2.World]) -> None:
        writing = asyncio.create_task(self._write(call))
        why = "rank 0 ended"
        try:
            while (message := await patiently(call.read(), self._silence_s)) is not _EOF:
                if message.HasField("world"):
                    world.set_result(message.world)
                elif message.HasField("ring"):
                    self._rung(message.ring)
                elif message.HasField("stage"):
                    self._hear(message.stage)
        except TimeoutError:
            why = f"rank 0 was silent for {self._silence_s:g} s"
        except grpc.aio.AioRpcError as error:
            why = error.details() or why
            if not world.done():
                world.set_exception(error)
        finally:
            writing.cancel()
            call.cancel()
            if not world.done():
                world.set_exception(ConnectionError(why))
            elif world.exception() is None:
                self._lose(why)

    async def _write(self, call: Any) -> None:
        """Send each message at once, and an empty one if there was none for a while."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # `_live` reports why
            while True:
                message = await self._outbox.next(self._sign_s)
                await call.write(gang_pb2.FromMember(**message))  # type: ignore[arg-type]
