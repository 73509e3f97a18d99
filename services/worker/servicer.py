"""Serve the worker's gRPC service to routers, operators, and workers that follow attempts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from baton import machine
from baton.protos import handoff_pb2, scheduler_pb2, worker_pb2, worker_pb2_grpc
from baton.services.engine import wire
from baton.services.engine.host import EngineHost
from baton.services.worker.dispatcher import Dispatcher
from baton.services.worker.media import Assembly
from baton.services.worker.outgoing import NotFollowedError
from baton.services.worker.router_session import RouterSession

TRIAL_TIMEOUT_S = 15.0  # the ranks' own deadlines are shorter


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self,
        identity: scheduler_pb2.WorkerIdentity,
        dispatcher: Dispatcher,
        heartbeat_s: float,
        become: Callable[[scheduler_pb2.Role, int], Awaitable[str]],
        *,
        host: EngineHost,
    ) -> None:
        """heartbeat_s: longest silence of a stream; become: changes the role, or returns why not."""
        self._identity = identity
        self._dispatcher = dispatcher
        self._heartbeat_s = heartbeat_s
        self._become = become
        self._host = host

    async def Hello(self, request: worker_pb2.HelloRequest, context: Any) -> worker_pb2.HelloReply:
        """Identify this worker, and refuse a router with another protocol, vLLM version or model."""
        del context
        return worker_pb2.HelloReply(
            refusal=self._refusal(request), identity=self._identity, protocol=wire.PROTOCOL
        )

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Any) -> worker_pb2.SetRoleReply:
        del context
        return worker_pb2.SetRoleReply(refusal=await self._become(request.role, request.fence))

    async def Inspect(self, request: worker_pb2.InspectRequest, context: Any) -> scheduler_pb2.Inspection:
        del context
        if request.clock_alone:
            return scheduler_pb2.Inspection(unix_s=time.time())
        found = await asyncio.to_thread(machine.inspection)
        found.kv_addresses.extend(self._host.kv_addresses)
        return found

    async def TryHandoff(self, request: worker_pb2.TryHandoffRequest, context: Any) -> handoff_pb2.TrialReply:
        del context
        sources = list(request.sources)
        return await asyncio.to_thread(
            self._host.try_handoff, sources, request.transport, request.bytes, TRIAL_TIMEOUT_S
        )

    async def Run(self, requests: AsyncIterator[worker_pb2.RunRequest], context: Any) -> None:
        """Serve a router's stream. When it ends, its requests are aborted."""
        session = self._dispatcher.connect(context.peer())
        tasks = [
            asyncio.create_task(self._read(session, requests)),
            asyncio.create_task(session.write(context)),
            asyncio.create_task(session.stay_alive(self._heartbeat_s / 2)),
            asyncio.create_task(session.wait_over()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._dispatcher.disconnect(session)
            for task in tasks:
                task.cancel()
            for task in tasks:
                # gRPC raises these if the router has left, which is normal.
                with contextlib.suppress(asyncio.CancelledError, grpc.RpcError, asyncio.InvalidStateError):
                    await task
        if session.is_cut:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this router does not read its replies")

    async def Follow(self, request: worker_pb2.FollowRequest, context: Any) -> None:
        """Report the progress of an attempt's KV to another worker, until the final reply."""
        try:
            with self._dispatcher.outgoing.follower(request) as follower:
                more = True
                while more:
                    reply = await follower.next()
                    await context.write(reply)
                    more = reply.HasField("begun")
        except NotFollowedError as error:
            await context.abort(error.code, str(error))

    async def _read(self, session: RouterSession, requests: AsyncIterator[worker_pb2.RunRequest]) -> None:
        image = Assembly()
        async for request in requests:
            if request.HasField("media"):
                if (data := image.take(request.media)) is not None:
                    name, size = request.media.identifier, len(data)
                    if (item := await self._dispatcher.images.add(name, data)) is not None:
                        session.received.add(name, item, size)
            elif request.HasField("start"):
                self._dispatcher.start(session, request.start)
            elif request.HasField("abort"):
                self._dispatcher.abort(request.abort.request_ids)

    def _refusal(self, request: worker_pb2.HelloRequest) -> str:
        mine, router = self._identity, f"router {request.router_id}"
        for what, theirs, ours, cure in (
            ("speaks protocol", request.protocol, wire.PROTOCOL, "run the same version of Baton"),
            ("runs vLLM", request.vllm_version, mine.vllm_version, "run the same version"),
            ("serves model", request.model, mine.model, "start both with the same --model"),
        ):
            if theirs != ours:
                return f"{router} {what} {theirs!r}, worker {mine.worker_id} {ours!r}: {cure}"
        return ""
