"""Enforce the table of roles in gRPC servers: forbidden calls get PERMISSION_DENIED.

Only calls are checked. A router's Run stream to a worker is one call for all its requests, and a pull is one
call for a whole prompt, so tokens cost nothing extra.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio

from baton.security import access
from baton.security.errors import IdentityError
from baton.security.names import Name

_DENIED = grpc.StatusCode.PERMISSION_DENIED


_parse = functools.lru_cache(maxsize=4096)(Name.parse)


def _caller(context: Any) -> Name:
    found = context.auth_context().get("peer_spiffe_id", [b""])
    return _parse(found[0].decode())


def _look(method: str, topic: str, context: Any, message: Any = None) -> str:
    try:
        caller = _caller(context)
    except IdentityError as error:
        return f"the caller's certificate: {error}"
    problem = access.objection(method, caller, topic)
    return problem or ("" if message is None else access.objection_to(method, caller, message))


class AioGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, topic: str) -> None:
        self._topic = topic

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method

        async def one(request: Any, context: Any, answer: Callable[..., Awaitable[Any]]) -> Any:
            if problem := _look(method, self._topic, context, request):
                await context.abort(_DENIED, problem)
            return await answer(request, context)

        async def many(requests: AsyncIterator[Any], context: Any, answer: Callable[..., Any]) -> Any:
            if problem := _look(method, self._topic, context):
                await context.abort(_DENIED, problem)
            return await answer(requests, context)

        return _wrapped(handler, one, many)


class Guard(grpc.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, topic: str) -> None:
        self._topic = topic

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        method = handler_call_details.method

        def one(request: Any, context: Any, answer: Callable[..., Any]) -> Any:
            if problem := _look(method, self._topic, context, request):
                context.abort(_DENIED, problem)
            return answer(request, context)

        def many(requests: Iterator[Any], context: Any, answer: Callable[..., Any]) -> Any:
            if problem := _look(method, self._topic, context):
                context.abort(_DENIED, problem)
            return answer(requests, context)

        return _wrapped(handler, one, many)


def _wrapped(handler: Any, one: Callable[..., Any], many: Callable[..., Any]) -> Any:
    """Return the guarded handler: `one` for calls with one message, `many` for streams."""
    if handler is None:
        return None  # no such method, which gRPC reports
    ends = (handler.request_streaming, handler.response_streaming)
    kind = "_".join("stream" if streams else "unary" for streams in ends)
    guard, answer = many if handler.request_streaming else one, getattr(handler, kind)

    def guarded(request: Any, context: Any) -> Any:
        return guard(request, context, answer)

    async def guarded_later(request: Any, context: Any) -> Any:
        return await guard(request, context, answer)

    return getattr(grpc, f"{kind}_rpc_method_handler")(
        guarded_later if inspect.iscoroutinefunction(guard) else guarded,
        handler.request_deserializer,
        handler.response_serializer,
    )
