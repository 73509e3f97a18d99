"""Follow attempts at other workers whose KV or embeddings are needed by attempts here, with the Follow call.

Channels are kept and reused, because connecting takes longer than most calls. A call costs 0.25 to 0.5 ms of
CPU at each end, and 15 KB while it is open. A broken connection breaks all its calls; each is retried once,
because the source remembers its answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import grpc
import grpc.aio

from baton import rpc
from baton.handoff import errors
from baton.handoff.channels import ChannelCache
from baton.handoff.reports import Problem
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import Complete, FollowReply, FollowRequest, Source
from baton.protos.worker_pb2_grpc import WorkerStub
from baton.services.errors import describe
from baton.services.worker.incoming import Event
from baton.tasks import patiently

logger = logging.getLogger(__name__)

# All in seconds.
CONNECT_S = 5.0
AGAIN_S = 1.0  # connect timeout of the retry
PAUSE_S = 0.05  # longest pause before a call is retried
MAX_CHANNELS = 256  # beyond this, idle ones are closed; gRPC disconnects an idle one after 30 minutes

# Statuses with which the source refuses. Any other status means that the call broke.
_REFUSALS: Mapping[grpc.StatusCode, type[errors.HandoffError]] = MappingProxyType(
    {
        grpc.StatusCode.NOT_FOUND: errors.UnknownHandoff,
        grpc.StatusCode.PERMISSION_DENIED: errors.WrongTicket,
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.SourceBusy,
        grpc.StatusCode.ABORTED: errors.AlreadyTaken,
        grpc.StatusCode.UNIMPLEMENTED: errors.SourceError,
    }
)
_NOT_READY = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)


class _FailureError(Exception):
    def __init__(self, event: Event, problem: errors.HandoffError, *, broke: bool = False) -> None:
        super().__init__(str(problem))
        self.event = event
        self.problem = problem
        self.broke = broke  # an established connection was lost: try again


class SourceListener(Protocol):
    """A receiver of a source's replies. The last call is `on_complete` or `on_failed`."""

    call: asyncio.Task[None] | None

    def on_begun(self, manifest: Manifest) -> None: ...
    def on_complete(self, complete: Complete) -> None: ...
    def on_failed(self, event: Event, problem: Problem) -> None: ...


class Following:
    """The Follow calls of this worker, and their channels."""

    def __init__(self) -> None:
        self._channels = ChannelCache(rpc.Dialler.aio_channel, WorkerStub, self._close, MAX_CHANNELS)
        self._calls: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self, incoming: SourceListener, source: Source, epoch: int, within_s: float | None) -> None:
        """Pass the source's replies to `incoming`, for `within_s` seconds at most (None: no limit)."""
        call = incoming.call = asyncio.create_task(self._run(incoming, source, epoch, within_s))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    @property
    def calls(self) -> int:
        return len(self._calls)

    async def close(self) -> None:
        for call in list(self._calls):
            call.cancel()
        if self._calls:
            await asyncio.wait(set(self._calls))
        self._channels.close()
        if self._closing:
            await asyncio.wait(set(self._closing))

    async def _run(
        self, incoming: SourceListener, source: Source, epoch: int, within_s: float | None
    ) -> None:
        who = _name(source)
        failure: _FailureError | None = None
        try:
            hearing = self._hear(incoming, source, epoch)
            await (hearing if within_s is None else patiently(hearing, within_s))
        except TimeoutError:
            failure = _FailureError(Event.LATE, errors.SourceTimeout(f"{who} was not done in time"))
        except _FailureError as error:
            failure = error
        except Exception as error:  # otherwise the attempt would wait forever
            logger.exception("replies of %s about request %s cannot be used", who, source.request_id)
            failure = _FailureError(Event.WRONG, errors.SourceError(f"{who}: {describe(error)}"))
        if failure is not None:
            incoming.on_failed(failure.event, Problem.of(failure.problem))

    async def _hear(self, incoming: SourceListener, source: Source, epoch: int) -> None:
        try:
            await self._call(incoming, source, epoch, CONNECT_S)
        except _FailureError as failure:
            if not failure.broke:
                raise
            logger.info("asking again: %s", failure, extra={"request_id": source.request_id})
        else:
            return
        await asyncio.sleep(PAUSE_S * random.uniform(0.2, 1.0))  # noqa: S311 (spreads the retries)
        await self._call(incoming, source, epoch, AGAIN_S)

    async def _call(self, incoming: SourceListener, source: Source, epoch: int, connect_s: float) -> None:
        kept = self._channels.begin(source.address)
        connected = False
        try:
            connected = await _connected(kept.channel, connect_s)
            call = kept.stub.Follow(FollowRequest(request_id=source.request_id, epoch=epoch, key=source.key))
            try:
                async for reply in call:
                    if _pass_on(reply, incoming):
                        return
            finally:
                call.cancel()
        except grpc.RpcError as error:
            raise _broken(source, error, connected) from None
        finally:
            self._channels.end(kept)
        hung_up = errors.TransportFailed("the source hung up before its prompt was complete")
        raise _FailureError(Event.LOST, hung_up, broke=True)

    # Channels.

    def _close(self, channel: grpc.aio.Channel) -> None:
        closing = asyncio.ensure_future(channel.close(None))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def _connected(channel: grpc.aio.Channel, within_s: float) -> bool:
    """Wait `within_s` for a channel (gRPC: 20 s); return whether it connected. Raises _FailureError."""
    state = channel.get_state(try_to_connect=True)
    if state in _NOT_READY:
        try:
            state = await patiently(_settled(channel, state), within_s)
        except TimeoutError:
            problem = errors.TransportFailed(f"no connection to the source within {within_s:g} s")
            raise _FailureError(Event.LOST, problem) from None
    return state is grpc.ChannelConnectivity.READY


async def _settled(channel: grpc.aio.Channel, state: grpc.ChannelConnectivity) -> grpc.ChannelConnectivity:
    while state in _NOT_READY:
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
    return state


def _pass_on(reply: FollowReply, incoming: SourceListener) -> bool:
    """Pass a reply on to `incoming`; return whether it was the last. Raises _FailureError."""
    said = reply.WhichOneof("message")
    if said == "begun":
        incoming.on_begun(reply.begun)
        return False
    if said == "complete":
        incoming.on_complete(reply.complete)
        return True
    if said == "problem":
        raise _FailureError(Event.REFUSED, Problem(reply.problem.name, reply.problem.text).to_error())
    raise _FailureError(
        Event.WRONG, errors.MalformedManifest("the source sent a reply that this version does not know")
    )


def _broken(source: Source, error: grpc.RpcError, connected: bool) -> _FailureError:
    code, details = error.code(), error.details() or ""
    why = rpc.tls_problem(details) or details
    text = f"{_name(source)} cannot be followed: {code.name}: {why}"
    if (refusal := _REFUSALS.get(code)) is not None:
        return _FailureError(Event.REFUSED, refusal(text))
    return _FailureError(Event.LOST, errors.TransportFailed(text), broke=connected)


def _name(source: Source) -> str:
    return f"worker {source.worker_id} at {source.address}"
