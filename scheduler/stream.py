"""A router's stream to one scheduler: a message, its answer, the next message.

A call costs gRPC twice what a message on a stream does. The stream is opened with the first message, and
again with the next one after it broke or the channel changed.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from baton.protos import scheduler_pb2 as pb
from baton.tasks import patiently


class Stream:
    """One stream at a time. For one event loop, and one message under way."""

    def __init__(self) -> None:
        self._stub: Any = None  # of the call
        self._call: Any = None

    async def ask(self, stub: Any, message: pb.ExchangeRequest, timeout_s: float) -> pb.ExchangeReply:
        """Return the answer to a message. Raises AioRpcError.

        Without an answer in time the stream is given up, so that no late answer is taken for another's.
        """
        try:
            reply = await patiently(self._ask(stub, message), timeout_s)
        except TimeoutError:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        if reply is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise _error(grpc.StatusCode.UNAVAILABLE, "it hung up")
        return reply  # type: ignore[no-any-return]

    def close(self) -> None:
        """Hang up."""
        if self._call is not None:
            self._call.cancel()

    async def _ask(self, stub: Any, message: pb.ExchangeRequest) -> Any:
        if stub is not self._stub or self._call.done():
            self.close()  # it shows a certificate that was replaced
            self._stub, self._call = stub, stub.Exchange()
        await self._call.write(message)
        return await self._call.read()


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)
