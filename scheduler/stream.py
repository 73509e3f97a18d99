"""A gRPC stream that is called like a method: a message of a stream costs half as much as a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from baton.tasks import patiently


class Stream:
    """One stream, opened as needed. Send one message at a time."""

    def __init__(self, opened: Callable[[], Any]) -> None:
        """Open the stream with `opened`, a method of a stub."""
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
