"""Join the workers of a gang: they meet before their engines load, wake each other, and end together.

The worker of rank 0 leads: it serves `Gang.Join`, and every other worker keeps one call to it. The link is up
before any engine loads, because an engine that waits for a missing one waits for many minutes. A member that
leaves before all have met is awaited again. After that the end of one link is the end of the gang.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from baton import rpc
from baton.protos import gang_pb2, gang_pb2_grpc
from baton.security.names import Role
from baton.services.errors import StartError
from baton.tasks import patiently, spawn, stop

logger = logging.getLogger(__name__)

REDIAL_S = 0.5


@dataclass(frozen=True)
class Seat:
    """A worker's place in a gang. `facts` must be equal in all its members."""

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


class _Bell:
    """The latest ring that still has to be sent. Only the latest matters: each wave ends in all members."""

    def __init__(self) -> None:
        self._wave: int | None = None
        self._rung = asyncio.Event()

    def ring(self, wave: int) -> None:
        self._wave = wave
        self._rung.set()

    async def next(self, timeout_s: float) -> int | None:
        """Return the wave of the next ring; None if there is none in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        self._rung.clear()
        wave, self._wave = self._wave, None
        return wave


class GangLink:
    """One worker's end of the link.

    lost: resolves once, with the reason, when the gang is over
    """

    def __init__(self, seat: Seat, silence_s: float, rung: Callable[[int], None]) -> None:
        """Prepare the link.

        silence_s: seconds without a message after which the other end counts as dead; rung: called in the
        loop with the wave of each ring of another member
        """
        self.seat = seat
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._silence_s = silence_s
        self._rung = rung

    async def meet(self, timeout_s: float) -> gang_pb2.World:
        """Wait until all members have joined. Raises StartError if they do not in time, or cannot."""
        raise NotImplementedError

    def ring(self, wave: int) -> None:
        """Tell all other members that this one has work in the wave."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leave the gang, which ends it."""
        raise NotImplementedError

    def _lose(self, why: str) -> None:
        if not self.lost.done():
            logger.error("gang %s is over: %s", self.seat.gang, why)
            self.lost.set_result(why)

    async def _write_rings(self, bell: _Bell, write: Callable[[int | None], Awaitable[None]]) -> None:
        """Write each ring at once, and something at least three times within `silence_s`."""
        while True:
            await write(await bell.next(self._silence_s / 3))


class Leader(GangLink, gang_pb2_grpc.GangServicer):
    """The link at rank 0: the service that the other members join."""

    def __init__(
        self,
        seat: Seat,
        silence_s: float,
        rung: Callable[[int], None],
        open_world: Callable[[], gang_pb2.World],
    ) -> None:
        """open_world: opens the store at which the engines meet; called once, when all members are there."""
        super().__init__(seat, silence_s, rung)
        self._open_world = open_world
        self._bells: dict[int, _Bell] = {}
        self._world: asyncio.Future[gang_pb2.World] = asyncio.get_running_loop().create_future()

    async def meet(self, timeout_s: float) -> gang_pb2.World:
        self._complete()
        try:
            return await asyncio.wait_for(asyncio.shield(self._world), timeout_s)
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in range(1, self.seat.size) if rank not in self._bells)
            raise StartError(
                f"gang {self.seat.gang}: rank {missing} of {self.seat.size} did not join within "
                f"{timeout_s:g} s; see why it did not start, or start it"
            ) from None

    def ring(self, wave: int) -> None:
        self._ring_others(0, wave)

    async def close(self) -> None:
        self._lose("rank 0 leaves")

    async def Join(
        self, requests: AsyncIterator[gang_pb2.FromMember], context: Any
    ) -> AsyncIterator[gang_pb2.FromLeader]:
        """Keep a member in the gang until either end leaves."""
        member = await self._admitted(requests, context)
        bell = self._bells[member.rank] = _Bell()
        logger.info("gang %s: rank %d joined (%s)", self.seat.gang, member.rank, member.worker_id)
        reading = asyncio.create_task(self._read(member.rank, requests))
        try:
            self._complete()
            # Until all are there, empty messages show that this end lives.
            while not self._world.done() and not reading.done():
                yield gang_pb2.FromLeader()
                await asyncio.wait(
                    {self._world, reading}, timeout=self._silence_s / 3, return_when="FIRST_COMPLETED"
                )
            if self._world.done():
                yield gang_pb2.FromLeader(world=self._world.result())
            while not reading.done() and not self.lost.done():
                wave = await bell.next(self._silence_s / 3)
                yield gang_pb2.FromLeader(ring=wave) if wave is not None else gang_pb2.FromLeader()
        finally:
            await stop(reading)
            del self._bells[member.rank]
            if self._world.done():
                self._lose(f"rank {member.rank} ({member.worker_id}) ended or is silent")
        await context.abort(
            grpc.StatusCode.ABORTED, self.lost.result() if self.lost.done() else "you were silent"
        )

    async def _admitted(self, requests: AsyncIterator[gang_pb2.FromMember], context: Any) -> gang_pb2.Join:
        first = None
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            first = await asyncio.wait_for(anext(requests), self._silence_s)
        if first is None or not first.HasField("join"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Join")
        member: gang_pb2.Join = first.join  # type: ignore[union-attr]
        if why := self.seat.objection(member):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        if self._world.done() or member.rank in self._bells:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"rank {member.rank} of gang {self.seat.gang} is here already",
            )
        return member

    def _complete(self) -> None:
        if len(self._bells) == self.seat.size - 1 and not self._world.done():
            self._world.set_result(self._open_world())

    async def _read(self, rank: int, requests: AsyncIterator[gang_pb2.FromMember]) -> None:
        """Pass on a member's rings until it ends or is silent."""
        with contextlib.suppress(StopAsyncIteration, TimeoutError, grpc.RpcError):
            while True:
                message = await patiently(anext(requests), self._silence_s)  # type: ignore[arg-type]
                if message.HasField("ring"):
                    self._ring_others(rank, message.ring)
                    self._rung(message.ring)

    def _ring_others(self, rank: int, wave: int) -> None:
        for other, bell in self._bells.items():
            if other != rank:
                bell.ring(wave)


class Member(GangLink):
    """The link at another rank: a call of the leader."""

    def __init__(
        self, seat: Seat, silence_s: float, rung: Callable[[int], None], find: Callable[[], Awaitable[str]]
    ) -> None:
        """find: returns the leader's address, or an empty text while it is unknown."""
        super().__init__(seat, silence_s, rung)
        self._find = find
        self._bell = _Bell()
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None

    async def meet(self, timeout_s: float) -> gang_pb2.World:
        problem = "the scheduler knows no leader"
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (left_s := deadline - asyncio.get_running_loop().time()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    if address := await self._find():
                        return await self._join(address)
            except TimeoutError:
                problem = "not all members joined"
                break
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise StartError(
                        f"gang {self.seat.gang} refuses this worker: {error.details()}"
                    ) from None
                problem = error.details() or error.code().name
            await self.close()
            await asyncio.sleep(REDIAL_S)
        await self.close()
        raise StartError(
            f"gang {self.seat.gang}: rank {self.seat.rank} did not meet the others within {timeout_s:g} s: "
            f"{problem}"
        )

    def ring(self, wave: int) -> None:
        self._bell.ring(wave)

    async def close(self) -> None:
        if self._task is not None:
            await stop(self._task)
        if self._channel is not None:
            await self._channel.close(None)
        self._task = self._channel = None

    async def _join(self, address: str) -> gang_pb2.World:
        self._channel = rpc.aio_channel(address, Role.WORKER)
        call = gang_pb2_grpc.GangStub(self._channel).Join()
        await call.write(gang_pb2.FromMember(join=self.seat.join()))
        world: asyncio.Future[gang_pb2.World] = asyncio.get_running_loop().create_future()
        self._task = spawn(self._live(call, world), f"the link to the leader of gang {self.seat.gang}")
        return await world

    async def _live(self, call: Any, world: asyncio.Future[gang_pb2.World]) -> None:
        async def write(wave: int | None) -> None:
            await call.write(gang_pb2.FromMember(ring=wave) if wave is not None else gang_pb2.FromMember())

        writing = asyncio.create_task(self._write_rings(self._bell, write))
        why = "rank 0 ended"
        try:
            while (message := await patiently(call.read(), self._silence_s)) is not grpc.aio.EOF:
                if message.HasField("world"):
                    world.set_result(message.world)
                elif message.HasField("ring"):
                    self._rung(message.ring)
        except TimeoutError:
            why = f"rank 0 is silent for {self._silence_s:g} s"
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
