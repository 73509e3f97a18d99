"""The choice among several schedulers, and the outcome of a call to one."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.protos import scheduler_pb2 as pb
from baton.protos import scheduler_pb2_grpc as rpc
from baton.rpc import Line, tls_problem
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.tasks import spawn, stop
from baton.security.names import Role

CHECK_S = 1.0  # s between checks of one among several, and the deadline of a check
MISSED = 2  # answers in a row until a scheduler counts as dead
# Checks in a row until a scheduler that says that it does not serve is passed over, and until one that serves
# again is preferred again. Others over the same store lose it, and have it again, up to a second and a half
# later: then no client need move, and the scheduler that was asked meanwhile knows what happened meanwhile.
IDLE_CHECKS = 3
SERVICE = pb.DESCRIPTOR.services_by_name["Scheduler"].full_name

# What gRPC puts before the reason: "failed to connect to all addresses; last error: UNKNOWN: ipv4:ADDRESS: ".
_BEFORE_REASON = re.compile(r"^failed to connect to all addresses; last error: ([A-Z_]+: )?(ipv[46]:\S+: )?")


def _in_short(details: str) -> str:
    """Return the reason out of gRPC's words for a call that failed."""
    reason = _BEFORE_REASON.sub("", details)
    if "HTTP/2" in reason:
        return f"something else listens there: {reason}"
    return f"{meant}: {reason}" if (meant := tls_problem(reason)) else reason


class _Endpoint:
    def __init__(self, address: str) -> None:
        self.address = address
        self._line = Line(address, Role.SCHEDULER)
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None  # of that channel
        self.answering = True  # as far as is known; also before the first call
        self.suspected = False  # an answer was missed, and none came since
        self.asked_at = 0.0  # time.monotonic(), of the last call or check
        self._missed = 0  # answers in a row
        self._missed_at = 0.0  # time.monotonic(), of the last one
        self.idle = 0  # checks in which it said that it does not serve, less those since; at most IDLE_CHECKS
        self._checked_at = 0.0  # time.monotonic()
        self._check: asyncio.Task[None] | None = None

    @property
    def stub(self) -> Any:
        """The stub to call it with."""
        if (channel := self._line.channel) is not self._channel:
            self._channel = channel
            self._stub = rpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        return self._stub

    @property
    def well(self) -> bool:
        """Whether it answers and serves, as far as is known."""
        return self.answering and not self.suspected and not self.idle

    def answered(self) -> None:
        """Note that a call was answered."""
        self.answering, self.suspected, self._missed = True, False, 0

    def failed(self, error: grpc.aio.AioRpcError, began: float) -> None:
        """Note that a call or a check, which began at `began`, had no answer."""
        if error.code() == grpc.StatusCode.UNAVAILABLE:  # refused, or hung up on: nobody is there
            self._missed = MISSED
        elif began >= self._missed_at:  # calls that waited side by side count as one
            self._missed += 1
        self._missed_at = time.monotonic()
        self.suspected = True
        self.answering = self._missed < MISSED

    def check(self) -> None:
        """Check its health in the background, unless a check is under way; no call has to wait for it."""
        if self._check is None or self._check.done():
            self.asked_at = self._checked_at = time.monotonic()
            self._check = spawn(self._ask_health(), f"check of scheduler {self.address}")

    def check_if_due(self) -> None:
        """Check it, unless that was done a moment ago."""
        if time.monotonic() - self._checked_at >= CHECK_S:
            self.check()

    async def close(self) -> None:
        """Hang up."""
        if self._check:
            await stop(self._check)
        await self._line.close()

    async def _ask_health(self) -> None:
        began = time.monotonic()
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            reply = await health_pb2_grpc.HealthStub(self._line.channel).Check(request, timeout=CHECK_S)
        except grpc.aio.AioRpcError as error:
            self.failed(error, began)
            return
        # Its calls may be missed all the same: only an answered one makes `_missed` zero again.
        self.answering, self.suspected = True, False
        serves = reply.status == health_pb2.HealthCheckResponse.SERVING
        self.idle = max(0, self.idle - 1) if serves else min(IDLE_CHECKS, self.idle + 1)


class Endpoints:
    """Schedulers that share a store: the first of the list that answers, and serves, gets the calls.

    All clients use the same order, so that all are served by the same one where possible: also while that one
    works from its memory it knows of all bookings and all workers. One that lacks its store says by gRPC's
    health service that it does not serve: it is passed over for one that does, and called where none does.

    No scheduler is taken for dead by one missed answer: a machine stands still for a second now and then. The
    first one starts a check; the next one in a row counts. A refused connection counts at once.
    """

    def __init__(self, addresses: str) -> None:
        """Take `addresses`: host:port, or several with commas between them. Connects on first use."""
        self._all = [_Endpoint(address.strip()) for address in addresses.split(",")]
        self._last = self._all[0]  # the last one that was called

    def __len__(self) -> int:
        return len(self._all)

    @property
    def last(self) -> str:
        """The address of the one that was called last."""
        return self._last.address

    @property
    def answering(self) -> bool:
        """Whether there is one that is not known to be dead."""
        return any(endpoint.answering for endpoint in self._all)

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """Call one scheduler, once. Raises SchedulerUnavailable; Refused for a wrong or forbidden call."""
        endpoint = self._pick()
        began = endpoint.asked_at = time.monotonic()
        try:
            reply = await getattr(endpoint.stub, method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            details = " ".join((error.details() or error.code().name).split())
            if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED):
                endpoint.answered()
                raise Refused(details) from None
            endpoint.failed(error, began)
            if endpoint.answering:
                endpoint.check()
            raise SchedulerUnavailable(
                f"scheduler at {endpoint.address} does not answer ({_in_short(details)}); "
                "is it up, is the address right?"
            ) from None
        endpoint.answered()
        return reply

    async def close(self) -> None:
        """Hang up."""
        for endpoint in self._all:
            await endpoint.close()

    def _pick(self) -> _Endpoint:
        """Return the first that is well; else one that answers; else the one not called for longest."""
        if len(self._all) > 1:
            first = self._all[0]
            for endpoint in [first] if first.well else self._all:
                endpoint.check_if_due()
        answering = [one for one in self._all if one.answering]
        heard = [one for one in answering if not one.suspected] or answering
        # The one that was called last may say a few times that it does not serve.
        best = [one for one in heard if one.idle < (IDLE_CHECKS if one is self._last else 1)] or heard
        if not best:
            return min(self._all, key=lambda endpoint: endpoint.asked_at)
        self._last = best[0]
        return best[0]
