"""Choose among several schedulers, and turn failed calls into Baton's exceptions."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.protos import scheduler_pb2_grpc as rpc
from baton.rpc import Line, tls_problem
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.security.names import Role
from baton.tasks import patiently, spawn, stop

CHECK_S = 1.0  # s; interval and deadline of checks when there are several schedulers
MISSED = 2  # missed answers in a row before a scheduler counts as dead
BACK_S = 3.0  # delay until a returned scheduler gets keys again: it must first learn of workers and bookings

# gRPC's prefix before the reason: "failed to connect to all addresses; last error: UNKNOWN: ipv4:ADDRESS: ".
_BEFORE_REASON = re.compile(r"^failed to connect to all addresses; last error: ([A-Z_]+: )?(ipv[46]:\S+: )?")


def _in_short(details: str) -> str:
    reason = _BEFORE_REASON.sub("", details)
    if "HTTP/2" in reason:
        return f"something else listens there: {reason}"
    if "Method not found" in reason:
        return f"it is of another version of Baton than this process: run the same version: {reason}"
    return f"{meant}: {reason}" if (meant := tls_problem(reason)) else reason


class ExchangeStream:
    """A gRPC stream that is called like a method: a message on a stream costs half as much as a call.

    It is opened as needed. Send one message at a time.
    """

    def __init__(self, opened: Callable[[], Any]) -> None:
        self._open = opened
        self._call: Any = None

    async def __call__(self, message: Any, timeout: float) -> Any:
        """Send a message and return its reply. Raises AioRpcError.

        A timeout closes the stream, because a late reply would be mistaken for the reply to the next message.
        """
        try:
            reply = await patiently(self._ask(message), timeout)
        except TimeoutError:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        if reply is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise _error(grpc.StatusCode.UNAVAILABLE, "it hung up")
        return reply

    async def _ask(self, message: Any) -> Any:
        if self._call is None or self._call.done():
            self._call = self._open()
        await self._call.write(message)
        return await self._call.read()


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


class Endpoint:
    """One scheduler, and whether it answers this process."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._line = Line(address, Role.SCHEDULER)
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self.answering = True  # not known to be dead
        self.suspected = False  # did not answer the last call
        self.asked_at = 0.0  # time.monotonic() of the last call or check
        self._missed = 0  # missed answers in a row
        self._missed_at = 0.0  # time.monotonic() of the last miss
        self._heard_at = 0.0  # time.monotonic() of the last answer
        self._settled_at = 0.0  # time.monotonic() from which it gets keys again
        self._checked_at = 0.0  # time.monotonic()
        self._check: asyncio.Task[None] | None = None

    @property
    def stub(self) -> Any:
        if (channel := self._line.channel) is not self._channel:
            self._channel = channel
            self._stub = rpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
            self._stub.Exchange = ExchangeStream(self._stub.Exchange)
        return self._stub

    @property
    def settled(self) -> bool:
        return time.monotonic() >= self._settled_at

    def answered(self) -> None:
        self._missed = 0
        self._is_there()

    def failed(self, error: grpc.aio.AioRpcError, began: float) -> None:
        """Record that a call or a check that began at `began` got no answer."""
        if error.code() == grpc.StatusCode.UNAVAILABLE:  # nothing is listening
            self._missed = MISSED
        elif began >= self._missed_at:  # concurrent calls count as one miss
            self._missed += 1
        self._missed_at = time.monotonic()
        self.suspected = True
        self.answering = self._missed < MISSED

    def check(self) -> None:
        """Start a health check in the background, unless one is running."""
        if self._check is None or self._check.done():
            self.asked_at = self._checked_at = time.monotonic()
            self._check = spawn(self._ask_health(), f"check of scheduler {self.address}")

    def check_if_due(self) -> None:
        if time.monotonic() - max(self._checked_at, self._heard_at) >= CHECK_S:
            self.check()

    async def close(self) -> None:
        if self._check:
            await stop(self._check)
        await self._line.close()

    async def _ask_health(self) -> None:
        began = time.monotonic()
        request = health_pb2.HealthCheckRequest()
        try:
            await health_pb2_grpc.HealthStub(self._line.channel).Check(request, timeout=CHECK_S)
        except grpc.aio.AioRpcError as error:
            self.failed(error, began)
            return
        # A scheduler may answer checks but miss calls: only an answered call resets `_missed`.
        self._is_there()

    def _is_there(self) -> None:
        self._heard_at = time.monotonic()
        if not self.answering:
            self._settled_at = self._heard_at + BACK_S
        self.answering, self.suspected = True, False


class Endpoints:
    """Call one or all of several equivalent schedulers.

    A key, such as a router's id, belongs to the live scheduler with the highest hash of key and address
    (rendezvous hashing; Thaler and Ravishankar, 1998). When a scheduler dies, its keys spread over the
    others, and no other key moves. Without a key, the first live scheduler is called.

    A refused connection means that a scheduler is dead. One missed answer does not, because a machine may
    stall for a second, but the scheduler's keys move away until it answers a check. A scheduler gets its keys
    back `BACK_S` after it has answered again. A scheduler that has not answered for a second is checked,
    unless it is the only one.
    """

    def __init__(self, addresses: str) -> None:
        """Use the schedulers at `addresses`, separated by commas. Connects on first use."""
        self._all = [Endpoint(address.strip()) for address in addresses.split(",")]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._all)

    @property
    def answering(self) -> bool:
        return any(endpoint.answering for endpoint in self._all)

    def pick(self, key: str = "") -> Endpoint:
        """Return the scheduler to call for a key. If there are several, each costs a hash, about 2 us."""
        if len(self._all) == 1:
            return self._all[0]
        self._check()
        answering = [one for one in self._all if one.answering]
        serving = [one for one in answering if not one.suspected]
        if best := [one for one in serving if one.settled] or serving or answering:
            return owner(best, key) if key else best[0]
        return min(self._all, key=lambda endpoint: endpoint.asked_at)

    def owner(self, key: str) -> Endpoint:
        """Return the scheduler to which a key belongs while all are up."""
        return owner(self._all, key)

    def at(self, address: str) -> Endpoint:
        return next(one for one in self._all if one.address == address)

    @property
    def addresses(self) -> list[str]:
        return [one.address for one in self._all]

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """Call one scheduler once. Raises SchedulerUnavailable; Refused for a wrong or forbidden call."""
        return await self.ask(self.pick(), method, request, timeout_s)

    async def ask(self, endpoint: Endpoint, method: str, request: Any, timeout_s: float) -> Any:
        """Call this scheduler once. Raises as `call` does."""
        began = endpoint.asked_at = time.monotonic()
        try:
            reply = await getattr(endpoint.stub, method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            details = " ".join((error.details() or error.code().name).split())
            if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED):
                endpoint.answered()
                raise Refused(details) from None
            # Older schedulers lack this method, but otherwise work.
            if method == "FindLeader" and error.code() == grpc.StatusCode.UNIMPLEMENTED:
                endpoint.answered()
                raise SchedulerUnavailable(
                    f"the scheduler at {endpoint.address} is older and knows no gangs: upgrade it first"
                ) from None
            endpoint.failed(error, began)
            if endpoint.answering:
                endpoint.check()
            raise SchedulerUnavailable(
                f"scheduler at {endpoint.address} does not answer ({_in_short(details)}); "
                "is it up, is the address right?"
            ) from None
        endpoint.answered()
        return reply

    async def each(self, method: str, request: Any, timeout_s: float) -> dict[str, Any]:
        """Call all live schedulers concurrently; return the answers by address.

        Raises as `call` does if none answers.
        """
        self._check()
        asked = [one for one in self._all if one.answering] or [self.pick()]
        calls = (self.ask(one, method, request, timeout_s) for one in asked)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        problems = [one for one in replies if isinstance(one, BaseException)]
        for problem in problems:
            if len(problems) == len(replies) or not isinstance(problem, SchedulerUnavailable):
                raise problem
        return {
            one.address: reply
            for one, reply in zip(asked, replies, strict=True)
            if not isinstance(reply, BaseException)
        }

    async def close(self) -> None:
        for endpoint in self._all:
            await endpoint.close()

    def _check(self) -> None:
        if len(self._all) > 1:
            for endpoint in self._all:
                endpoint.check_if_due()


def owner(among: Sequence[Endpoint], key: str) -> Endpoint:
    return max(
        among, key=lambda one: hashlib.blake2b(f"{one.address} {key}".encode(), digest_size=8).digest()
    )
