"""Which roles may call which methods; gRPC servers answer all other calls with PERMISSION_DENIED.

Only calls are checked. A router's Run stream to a worker is one call for all its requests, and a pull is one
call for a whole prompt, so tokens cost nothing extra. A worker may only act for itself: the worker id in a
message must be the one in its certificate.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio

from baton.security.errors import IdentityError
from baton.security.names import Name, Role


@dataclass(frozen=True)
class Rule:
    """The roles that may call a method; `speaks_for` returns the worker id in its message."""

    roles: frozenset[Role]
    speaks_for: Callable[[Any], str] | None = None


def _for(*roles: Role, speaks_for: Callable[[Any], str] | None = None) -> Rule:
    return Rule(frozenset(roles), speaks_for)


def _its_worker(message: Any) -> str:
    return str(message.worker_id)


_SCHEDULER, _WORKER = "/baton.scheduler.v1.Scheduler/", "/baton.worker.v1.Worker/"
_GANG = "/baton.gang.v1.Gang/"
_HANDOFF, _HEALTH = "/baton.handoff.v1.Handoff/", "/grpc.health.v1.Health/"
_ALL = (Role.WORKER, Role.ROUTER, Role.SCHEDULER, Role.OPERATOR)

TABLE: Mapping[str, Rule] = MappingProxyType(
    {
        # a worker registers itself
        f"{_SCHEDULER}Register": _for(
            Role.WORKER, speaks_for=lambda request: str(request.identity.worker_id)
        ),
        f"{_SCHEDULER}Heartbeat": _for(Role.WORKER, speaks_for=_its_worker),
        f"{_SCHEDULER}Deregister": _for(Role.WORKER, speaks_for=_its_worker),
        f"{_SCHEDULER}FindLeader": _for(Role.WORKER),
        # a router places and reports
        f"{_SCHEDULER}Exchange": _for(Role.ROUTER),
        f"{_SCHEDULER}Snapshot": _for(Role.ROUTER),
        # an operator inspects and controls a deployment
        f"{_SCHEDULER}Describe": _for(Role.OPERATOR),
        f"{_SCHEDULER}Drain": _for(Role.OPERATOR),
        f"{_SCHEDULER}Undrain": _for(Role.OPERATOR),
        f"{_SCHEDULER}SetRole": _for(Role.OPERATOR),
        f"{_SCHEDULER}SetLogLevel": _for(Role.OPERATOR),
        f"{_SCHEDULER}Inspect": _for(Role.OPERATOR),
        f"{_SCHEDULER}TryHandoff": _for(Role.OPERATOR),
        f"{_SCHEDULER}Orders": _for(Role.OPERATOR),  # a fleet asks what should run in its places
        # routers send requests; a scheduler forwards operators' calls
        f"{_WORKER}Hello": _for(Role.ROUTER),
        f"{_WORKER}Run": _for(Role.ROUTER),
        f"{_WORKER}SetRole": _for(Role.SCHEDULER),
        f"{_WORKER}Inspect": _for(Role.SCHEDULER),
        f"{_WORKER}TryHandoff": _for(Role.SCHEDULER),
        f"{_WORKER}Follow": _for(Role.WORKER),  # with the attempt's key
        f"{_GANG}Join": _for(Role.WORKER),  # for the life of a gang
        # workers pull KV from each other, with a ticket (handoff/tickets.py)
        f"{_HANDOFF}Connect": _for(Role.WORKER),
        f"{_HANDOFF}Release": _for(Role.WORKER),
        f"{_HANDOFF}Renew": _for(Role.WORKER),
        f"{_HANDOFF}Taken": _for(Role.WORKER),
        f"{_HANDOFF}Staged": _for(Role.WORKER),
        f"{_HANDOFF}Sample": _for(Role.WORKER),  # only test payloads
        f"{_HANDOFF}Trial": _for(Role.WORKER),
        # any process with a certificate may check a service's health
        f"{_HEALTH}Check": _for(*_ALL),
        f"{_HEALTH}List": _for(*_ALL),
        f"{_HEALTH}Watch": _for(*_ALL),
    }
)


def objection(method: str, caller: Name, topic: str) -> str:
    """Return why the caller may not call this method in this topic; empty if it may."""
    if caller.topic != topic:
        return f"this is topic {topic!r}; the caller's certificate is for topic {caller.topic!r}"
    rule = TABLE.get(method)
    if rule is None:
        return f"no role may call {method}"
    if caller.role not in rule.roles:
        allowed = " or ".join(sorted(role.one for role in rule.roles))
        return f"{caller.role.one} may not call {method.rpartition('.')[2]}: {allowed} may"
    return ""


def objection_to(method: str, caller: Name, message: Any) -> str:
    """Return why the caller may not send this message; empty if it may."""
    rule = TABLE[method]
    if rule.speaks_for is None:
        return ""
    meant = rule.speaks_for(message)
    if meant == caller.worker_id:
        return ""
    return f"worker {caller.worker_id!r} may not speak for worker {meant!r}"


_DENIED = grpc.StatusCode.PERMISSION_DENIED


_parse = functools.lru_cache(maxsize=4096)(Name.parse)


def _look(method: str, topic: str, context: Any, message: Any = None) -> str:
    found = context.auth_context().get("peer_spiffe_id", [b""])
    try:
        caller = _parse(found[0].decode())
    except IdentityError as error:
        return f"the caller's certificate: {error}"
    problem = objection(method, caller, topic)
    return problem or ("" if message is None else objection_to(method, caller, message))


class AioGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, topic: str) -> None:
        self._topic = topic

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        return _guarded(handler, handler_call_details.method, self._topic, later=True)


class Guard(grpc.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, topic: str) -> None:
        self._topic = topic

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        return _guarded(handler, handler_call_details.method, self._topic, later=False)


def _guarded(handler: Any, method: str, topic: str, *, later: bool) -> Any:
    """Return the guarded handler. later: the server is an asyncio server."""
    if handler is None:
        return None  # no such method, which gRPC reports
    ends = (handler.request_streaming, handler.response_streaming)
    kind = "_".join("stream" if streams else "unary" for streams in ends)
    answer = getattr(handler, kind)

    def problem(request: Any, context: Any) -> str:
        return _look(method, topic, context, None if handler.request_streaming else request)

    def guarded(request: Any, context: Any) -> Any:
        if why := problem(request, context):
            context.abort(_DENIED, why)
        return answer(request, context)

    async def guarded_later(request: Any, context: Any) -> Any:
        if why := problem(request, context):
            await context.abort(_DENIED, why)
        return await answer(request, context)

    return getattr(grpc, f"{kind}_rpc_method_handler")(
        guarded_later if later else guarded, handler.request_deserializer, handler.response_serializer
    )
