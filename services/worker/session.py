"""Serve one router's stream: a bounded queue of replies, and one task that sends them.

A router takes a silent stream to mean a dead worker, so a stream without replies sends an empty one now and
then, from the loop that serves all requests: if that loop hangs, silence is right.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from baton.protos.worker_pb2 import RunReply

logger = logging.getLogger(__name__)

# Replies that wait for a router that does not receive: one per step, so some ten seconds of a busy engine.
QUEUE_LIMIT = 1024
QUEUE_BYTES = 256 << 20  # limit of queued outputs; only log-probabilities by the thousand come near it


class RouterSession:
    """A router's stream. Only its own `write` task writes to gRPC: concurrent writes kill a stream."""

    def __init__(self, number: int, peer: str) -> None:
        self.number = number
        self.peer = peer
        self._queue: asyncio.Queue[RunReply] = asyncio.Queue(QUEUE_LIMIT)
        self._bytes = 0  # bytes of queued outputs
        self._over = asyncio.Event()
        self.is_cut = False  # its router did not read
        self._sending = False
        self._spoke = False  # something was sent since the last sign of life

    @property
    def flushed(self) -> bool:
        """Whether all queued replies are with gRPC."""
        return self.is_cut or (self._queue.empty() and not self._sending)

    def send(self, reply: RunReply) -> None:
        """Queue a reply; a full queue cuts the router off. Never waits. Loop's thread only."""
        if self.is_cut:
            return
        size = len(reply.engine_outputs)
        if self._queue.full() or (self._bytes and self._bytes + size > QUEUE_BYTES):
            waiting = self._queue.qsize()
            logger.warning(
                "router %s does not read: %d replies of %d MiB wait, cut off",
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
        """Send until cancelled. Raises what gRPC raises on a closed stream."""
        while True:
            reply = await self._queue.get()
            self._bytes -= len(reply.engine_outputs)
            self._spoke = True
            self._sending = True
            await context.write(reply)
            self._sending = False

    async def stay_alive(self, every_s: float) -> None:
        """Send a sign of life whenever nothing else was sent for `every_s`; until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            if not self._spoke and self.flushed:
                self.send(RunReply())
            self._spoke = False

    async def wait_over(self) -> None:
        """Wait until this side has ended the stream."""
        await self._over.wait()
