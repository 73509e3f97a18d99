"""The choice among several schedulers, and the outcome of a call to one."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.protos import scheduler_pb2_grpc as rpc
from baton.rpc import Line, tls_problem
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.stream import Stream
from baton.security.names import Role
from baton.tasks import spawn, stop

CHECK_S = 1.0  # s between checks of one among several, and the deadline of a check
MISSED = 2  # answers in a row until a scheduler counts as dead
BACK_S = (
    3.0  # without keys for one that was dead, while another serves: it hears of workers and bookings first
)

# What gRPC puts before the reason: "failed to connect to all addresses; last error: UNKNOWN: ipv4:ADDRESS: ".
_BEFORE_REASON = re.compile(r"^failed to connect to all addresses; last error: ([A-Z_]+: )?(ipv[46]:\S+: )?")


def _in_short(details: str) -> str:
    """Return the reason out of gRPC's words for a call that failed."""
    reason = _BEFORE_REASON.sub("", details)
    if "HTTP/2" in reason:
        return f"something else listens there: {reason}"
    if "Method not found" in reason:
        return f"it is of another version of Baton than this process: run the same version: {reason}"
    return f"{meant}: {reason}" if (meant := tls_problem(reason)) else reason


class Endpoint:
    """One scheduler, as far as this process knows."""

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
        self._heard_at = 0.0  # time.monotonic(), of the last answer
        self._settled_at = 0.0  # time.monotonic(), from which on it gets keys again
        self._checked_at = 0.0  # time.monotonic()
        self._check: asyncio.Task[None] | None = None

    @property
    def stub(self) -> Any:
        """The stub to call it with."""
        if (channel := self._line.channel) is not self._channel:
            self._channel = channel
            self._stub = rpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
            self._stub.Exchange = Stream(self._stub.Exchange)
        return self._stub

    @property
    def settled(self) -> bool:
        """Whether it has been there for a while."""
        return time.monotonic() >= self._settled_at

    def answered(self) -> None:
        """Note that a call was answered."""
        self._missed = 0
        self._is_there()

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
        """Check it, unless that was done, or it answered, a moment ago."""
        if time.monotonic() - max(self._checked_at, self._heard_at) >= CHECK_S:
            self.check()

    async def close(self) -> None:
        """Hang up."""
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
        # Its calls may be missed all the same: only an answered one makes `_missed` zero again.
        self._is_there()

    def _is_there(self) -> None:
        self._heard_at = time.monotonic()
        if not self.answering:
            self._settled_at = self._heard_at + BACK_S
        self.answering, self.suspected = True, False


class Endpoints:
    """Schedulers that know the same, each in its own memory, and the calls: to one of them, or to all.

    A key, such as a router's id, belongs to the scheduler whose hash with it is highest, of those that serve
    (rendezvous hashing; Thaler and Ravishankar, 1998). So the keys of one that is gone spread over the
    others, and no other key moves. Without a key the first one that serves is called.

    No scheduler is taken for dead by one missed answer: a machine stands still for a second now and then. But
    its keys move at once, until it answers a check. A refused connection counts as a death at once. One that
    was dead gets its keys back `BACK_S` after it has answered. Each of several that has not answered for a
    second is checked.
    """

    def __init__(self, addresses: str) -> None:
        """Take `addresses`: host:port, or several with commas between them. Connects on first use."""
        self._all = [Endpoint(address.strip()) for address in addresses.split(",")]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._all)

    @property
    def answering(self) -> bool:
        """Whether there is one that is not known to be dead."""
        return any(endpoint.answering for endpoint in self._all)

    def pick(self, key: str = "") -> Endpoint:
        """Return the scheduler to call for a key. Costs a hash for each of several, some 2 us."""
        if len(self._all) == 1:
            return self._all[0]
        self._check()
        answering = [one for one in self._all if one.answering]
        serving = [one for one in answering if not one.suspected]
        if best := [one for one in serving if one.settled] or serving or answering:
            return owner(best, key) if key else best[0]
        return min(self._all, key=lambda endpoint: endpoint.asked_at)

    def owner(self, key: str) -> Endpoint:
        """Return the scheduler that a key belongs to while all serve."""
        return owner(self._all, key)

    def at(self, address: str) -> Endpoint:
        """Return the scheduler at an address of the list."""
        return next(one for one in self._all if one.address == address)

    @property
    def addresses(self) -> list[str]:
        """The addresses, in the order of the list."""
        return [one.address for one in self._all]

    async def call(self, method: str, request: Any, timeout_s: float, key: str = "") -> Any:
        """Call one scheduler, once. Raises SchedulerUnavailable; Refused for a wrong or forbidden call."""
        return await self.ask(self.pick(key), method, request, timeout_s)

    async def ask(self, endpoint: Endpoint, method: str, request: Any, timeout_s: float) -> Any:
        """Call this scheduler, once. Raises as `call` does."""
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

    async def each(self, method: str, request: Any, timeout_s: float) -> dict[str, Any]:
        """Call all that are not known to be dead, side by side; return the answers there were, by address.

        Raises as `call` does where none did.
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
        """Hang up."""
        for endpoint in self._all:
            await endpoint.close()

    def _check(self) -> None:
        """Check each of several that was not checked for a while, in the background."""
        if len(self._all) > 1:
            for endpoint in self._all:
                endpoint.check_if_due()


def owner(among: Sequence[Endpoint], key: str) -> Endpoint:
    """Return the one of these schedulers that a key belongs to."""
    return max(
        among, key=lambda one: hashlib.blake2b(f"{one.address} {key}".encode(), digest_size=8).digest()
    )
