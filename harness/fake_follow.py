"""Both ends of a Follow call between fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio

from baton.attempts import attempt_id
from baton.protos import handoff_pb2, worker_pb2, worker_pb2_grpc
from baton.rpc import aio_channel
from baton.security.names import Role

KEPT = 1000  # attempts that can be followed
COMES_S = 10.0  # timeout of a follower for the start of its attempt


class Told:
    """The replies to the followers of an attempt, which may not have started yet."""

    def __init__(self) -> None:
        self.key: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._replies: list[worker_pb2.FollowReply] = []
        self._more = asyncio.Event()

    def began(self, manifest: handoff_pb2.Manifest) -> None:
        self._tell(worker_pb2.FollowReply(begun=manifest))

    def encoded(self, manifest: handoff_pb2.EmbeddingManifest) -> None:
        self._tell(worker_pb2.FollowReply(complete=worker_pb2.Complete(embedding=manifest)))

    def completed(self, manifest: handoff_pb2.Manifest, tokens: list[int]) -> None:
        self._tell(worker_pb2.FollowReply(complete=worker_pb2.Complete(manifest=manifest, token_ids=tokens)))

    def failed(self, text: str) -> None:
        """Tell followers that there is nothing to pull; they ignore this after the end."""
        self._tell(worker_pb2.FollowReply(problem=worker_pb2.Problem(name="Gone", text=text)))

    async def replies(self) -> AsyncIterator[worker_pb2.FollowReply]:
        at = 0
        while True:
            while at == len(self._replies):
                self._more.clear()
                await self._more.wait()
            yield (reply := self._replies[at])
            at += 1
            if not reply.HasField("begun"):
                return

    def _tell(self, reply: worker_pb2.FollowReply) -> None:
        self._replies.append(reply)
        self._more.set()


class Followed:
    """The attempts of a fake worker that others can follow."""

    def __init__(self) -> None:
        self._told: dict[str, Told] = {}

    def of(self, request_id: str, epoch: int) -> Told:
        while len(self._told) > KEPT:
            del self._told[next(iter(self._told))]
        return self._told.setdefault(attempt_id(request_id, epoch), Told())

    def begin(self, start: worker_pb2.Start) -> None:
        """Let callers with the attempt's key follow it."""
        if start.key:
            self.of(start.request_id, start.epoch).key.set_result(start.key)

    async def follow(
        self, request: worker_pb2.FollowRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.FollowReply]:
        told = self.of(request.request_id, request.epoch)
        try:
            key = await asyncio.wait_for(asyncio.shield(told.key), COMES_S)
        except TimeoutError:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such attempt")
        if key != request.key:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "wrong key")
        async for reply in told.replies():
            yield reply


class Follower:
    """A fake worker's calls to other workers, with one channel each."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def complete(
        self, source: worker_pb2.Source, epoch: int
    ) -> worker_pb2.Complete | worker_pb2.Problem:
        """Follow an attempt's source to its end. Raises grpc.aio.AioRpcError if the call fails."""
        channel = self._channels.get(source.address)
        if channel is None:
            channel = self._channels[source.address] = aio_channel(source.address, Role.WORKER)
        asked = worker_pb2.FollowRequest(request_id=source.request_id, epoch=epoch, key=source.key)
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        async for reply in stub.Follow(asked):
            if reply.HasField("complete"):
                return worker_pb2.Complete.FromString(reply.complete.SerializeToString())
            if reply.HasField("problem"):
                return worker_pb2.Problem.FromString(reply.problem.SerializeToString())
        return worker_pb2.Problem(name="Gone", text="it said nothing")

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
