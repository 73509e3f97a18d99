"""How routers, workers and the command line talk to the scheduler.

    router         SchedulerClient.place, .reporter (baton.scheduler.reporter)
    worker         WorkerSession (baton.scheduler.session), over .register, .heartbeat, .deregister
    command line   SchedulerClient.describe, .drain

Every call has a deadline and ends in a reply or in one of our own exceptions. No call is repeated here: the
caller knows whether it may be (a placement is asked for again with the next epoch).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from baton.protos import scheduler_pb2 as pb
from baton.protos import scheduler_pb2_grpc as rpc
from baton.rpc import CALL_TIMEOUT_S, aio_channel
from baton.scheduler.errors import NoCapacity, Refused, SchedulerUnavailable
from baton.scheduler.reporter import Reporter
from baton.scheduler.types import Attempt

PLACE_TIMEOUT_S = 3.0  # a client waits for this one; the scheduler itself gives up on its store after 0.9 s

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class Placement:
    """Who takes one attempt; `prefill` is None where `decode` does it all. The reporter renews it."""

    attempt: Attempt
    prefill: pb.Worker | None
    decode: pb.Worker
    lease_s: float


class SchedulerClient:
    """One connection to one scheduler, made on first use and again by itself. Make it inside the event loop.

    All calls raise SchedulerUnavailable when nobody answers in time, and Refused for a malformed call.
    """

    def __init__(
        self, address: str, *, router_id: str = "", on_lost: Callable[[Attempt], None] | None = None
    ) -> None:
        """`on_lost` hears of an attempt whose reservation ran out though it was still renewed."""
        self.address = address
        self._router_id = router_id
        self._channel = aio_channel(address)
        self._stub: Any = rpc.SchedulerStub(self._channel)  # type: ignore[no-untyped-call]
        self.reporter = Reporter(self.report, on_lost)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def place(
        self,
        request_id: str,
        epoch: int,
        *,
        prompt_tokens: int,
        max_new_tokens: int,
        prefix_hashes: Iterable[bytes] = (),
        exclude: Iterable[str] = (),
    ) -> Placement:
        """Reserve workers for one attempt, and hold them until `reporter.finished`.

        `prompt_tokens` counts what is to be read: the prompt, and on a later attempt the answer so far.
        Epochs of one request count up from 1. Raises NoCapacity with code and retry_after_s; it raises
        SchedulerUnavailable also when the scheduler's store is away.
        """
        request = pb.PlaceRequest(
            request_id=request_id,
            router_id=self._router_id,
            epoch=epoch,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            prefix_hashes=prefix_hashes,
            exclude_workers=exclude,
        )
        reply: pb.PlaceReply = await self._answer(self._stub.Place(request, timeout=PLACE_TIMEOUT_S))
        if reply.HasField("rejection"):
            no = reply.rejection
            if no.code == pb.Rejection.CODE_STORE_AWAY:
                raise SchedulerUnavailable(f"scheduler at {self.address}: {no.message}", no.retry_after_s)
            raise NoCapacity(no.code, no.message, no.retry_after_s)
        placed = reply.placement
        placement = Placement(
            attempt=Attempt(placed.request_id, placed.epoch),
            prefill=placed.prefill if placed.HasField("prefill") else None,
            decode=placed.decode,
            lease_s=placed.lease_s,
        )
        self.reporter.hold(placement.attempt, placement.lease_s)
        return placement

    async def report(self, request: pb.ReportRequest) -> pb.ReportReply:
        """Send one batch. Routers use `reporter` instead."""
        request.router_id = self._router_id
        return await self._answer(self._stub.Report(request, timeout=CALL_TIMEOUT_S))

    async def register(self, identity: pb.WorkerIdentity, state: pb.WorkerState) -> pb.RegisterReply:
        """Raises Refused when the worker does not fit into the deployment."""
        request = pb.RegisterRequest(identity=identity, state=state)
        reply: pb.RegisterReply = await self._answer(self._stub.Register(request, timeout=CALL_TIMEOUT_S))
        if reply.refusal:
            raise Refused(reply.refusal)
        return reply

    async def heartbeat(
        self, worker_id: str, state: pb.WorkerState, load: pb.WorkerLoad
    ) -> pb.HeartbeatReply:
        request = pb.HeartbeatRequest(worker_id=worker_id, state=state, load=load)
        return await self._answer(self._stub.Heartbeat(request, timeout=CALL_TIMEOUT_S))

    async def deregister(self, worker_id: str) -> None:
        await self._answer(
            self._stub.Deregister(pb.DeregisterRequest(worker_id=worker_id), timeout=CALL_TIMEOUT_S)
        )

    async def describe(self) -> pb.Description:
        return await self._answer(self._stub.Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT_S))

    async def drain(self, worker_id: str) -> pb.DrainReply:
        """Ask a worker to drain; a unique beginning of its id is enough. The reply may name a problem."""
        return await self._answer(
            self._stub.Drain(pb.DrainRequest(worker_id=worker_id), timeout=CALL_TIMEOUT_S)
        )

    async def close(self) -> None:
        """Send what is still to be reported, within a second, and hang up."""
        await self.reporter.close()
        await self._channel.close(None)

    async def _answer(self, call: Awaitable[Reply]) -> Reply:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            details = " ".join((error.details() or error.code().name).split())
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise Refused(details) from None
            raise SchedulerUnavailable(
                f"scheduler at {self.address} does not answer ({details}); is it up, is the address right?"
            ) from None
