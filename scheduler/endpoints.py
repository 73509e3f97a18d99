"""Which of several schedulers is asked, and what comes of a call."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.protos import scheduler_pb2_grpc as rpc
from baton.rpc import aio_channel
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.tasks import spawn, stop

PROBE_S = 1.0  # s between probes of one that does not answer, while another does; and a probe's deadline


# What gRPC puts before the reason: "failed to connect to all addresses; last error: UNKNOWN: ipv4:ADDRESS: ".
_BEFORE_REASON = re.compile(r"^failed to connect to all addresses; last error: ([A-Z_]+: )?(ipv[46]:\S+: )?")


def _in_short(details: str) -> str:
    """The reason in what gRPC says of a call that failed."""
    reason = _BEFORE_REASON.sub("", details)
    return f"what listens there is none: {reason}" if "HTTP/2" in reason else reason


class _Endpoint:
    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = aio_channel(address)
        self.stub: Any = rpc.SchedulerStub(self.channel)  # type: ignore[no-untyped-call]
        self.answering = True  # the last call was answered, or there was none yet
        self.asked_at = 0.0  # time.monotonic(), of the last call or probe
        self.probe: asyncio.Task[None] | None = None

    async def ask_health(self) -> None:
        """Find out whether it answers again; no call has to wait for that."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_S)
        except grpc.aio.AioRpcError:
            return
        self.answering = True


class Endpoints:
    """Schedulers that share a store: the first of the list that answers is asked.

    All clients use the same order, so that all are served by the same one where possible: also while that one
    works from its memory it knows of all bookings and all workers.
    """

    def __init__(self, addresses: str) -> None:
        """`addresses`: host:port, or several with commas between them. Connects on first use."""
        self._all = [_Endpoint(address.strip()) for address in addresses.split(",")]

    def __len__(self) -> int:
        return len(self._all)

    @property
    def answering(self) -> bool:
        """There is one that answered its last call."""
        return any(endpoint.answering for endpoint in self._all)

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """One call to one scheduler, never repeated. Raises SchedulerUnavailable; Refused for nonsense."""
        endpoint = self._pick()
        endpoint.asked_at = time.monotonic()
        try:
            reply = await getattr(endpoint.stub, method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            details = " ".join((error.details() or error.code().name).split())
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise Refused(details) from None
            endpoint.answering = False
            raise SchedulerUnavailable(
                f"scheduler at {endpoint.address} does not answer ({_in_short(details)}); "
                "is it up, is the address right?"
            ) from None
        endpoint.answering = True
        return reply

    async def close(self) -> None:
        for endpoint in self._all:
            if endpoint.probe:
                await stop(endpoint.probe)
            await endpoint.channel.close(None)

    def _pick(self) -> _Endpoint:
        """The first that answers; where none does, the one that was not asked for longest."""
        for endpoint in self._all:
            if endpoint.answering:
                return endpoint
            self._probe(endpoint)
        return min(self._all, key=lambda endpoint: endpoint.asked_at)

    def _probe(self, endpoint: _Endpoint) -> None:
        due = time.monotonic() - endpoint.asked_at >= PROBE_S
        if len(self._all) > 1 and due and (endpoint.probe is None or endpoint.probe.done()):
            endpoint.asked_at = time.monotonic()
            endpoint.probe = spawn(endpoint.ask_health(), f"probe of scheduler {endpoint.address}")
