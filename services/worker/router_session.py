"""Send one router its replies, over its stream: a bounded queue, and one task that empties it.

A router considers a worker with a silent stream dead, so an empty reply is sent now and then. It comes from
the event loop that serves all requests: if that hangs, the silence is correct.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from baton.protos.worker_pb2 import RunReply
from baton.services.worker.media import Received

logger = logging.getLogger(__name__)

# Queued replies for a router that does not read: one per step, so about ten seconds of a busy engine.
QUEUE_LIMIT = 1024
QUEUE_BYTES = 256 << 20  # queued outputs; only large numbers of log-probabilities come near it


class RouterSession:
    """A router's stream. Only its `write` task writes to gRPC, because concurrent writes break a stream."""

    def __init__(self, number: int, peer: str) -> None:
        self.number = number
        self.peer = peer
        self.received = Received()
        self._queue: asyncio.Queue[RunReply] = asyncio.Queue(QUEUE_LIMIT)
        self._bytes = 0  # bytes of queued outputs
        self._over = asyncio.Event()
        self.is_cut = False  # cut off because the router did not read
        self._sending = False
        self._spoke = False  # something was sent since the last check

    @property
    def flushed(self) -> bool:
        """Whether gRPC has all queued replies."""
        return self.is_cut or (self._queue.empty() and not self._sending)

    def send(self, reply: RunReply) -> None:
        """Queue a reply without blocking; if the queue is full, cut the router off."""
        if self.is_cut:
            return
        size = len(reply.engine_outputs)
        if self._queue.full() or (self._bytes and self._bytes + size > QUEUE_BYTES):
            waiting = self._queue.qsize()
            logger.warning(
                "router %s does not read its replies: cut off with %d replies of %d MiB queued",
                self.peer,
                waiting,
                self._bytes >> 20,
            )
            self.is_cut = True
            self._over.set()
            return
        self._bytes += size
        self._queue.put_nowait(reply)

    def end(self) -> None:
        self._over.set()

    async def write(self, context: Any) -> None:
        """Send replies until cancelled, or until gRPC raises because the stream is closed."""
        while True:
            reply = await self._queue.get()
            self._bytes -= len(reply.engine_outputs)
            self._spoke = True
            self._sending = True
            await context.write(reply)
            self._sending = False

    async def stay_alive(self, every_s: float) -> None:
        """Send an empty reply whenever nothing was sent for `every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            if not self._spoke and self.flushed:
                self.send(RunReply())
            self._spoke = False

    async def wait_over(self) -> None:
        await self._over.wait()
