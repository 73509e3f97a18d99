"""Calls of the Redis store's scripts, in batches: who calls while others wait for a reply goes with the next.

Redis runs one script at a time, so nothing is lost by that; each script stays a step of its own. What is won
is most of a call's cost in this process: a connection taken and given back, a task, a timer and two system
calls for each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from baton import redis_link
from baton.tasks import patiently, spawn

BATCH_CALLS = 64  # in one batch; the deadline is that of a batch

Argument = str | int | bytes


@dataclass(frozen=True, slots=True)
class _Call:
    script: str
    arguments: Sequence[Argument]
    reply: asyncio.Future[Any]


class ScriptCalls:
    """The scripts of one store, by name. For one event loop."""

    def __init__(
        self, client: Redis, sources: Mapping[str, str], keys: Sequence[str], timeout_s: float
    ) -> None:
        """Prepare calls of `sources` with these keys; a batch has `timeout_s`, connecting included."""
        self._client = client
        self._sources = sources
        # What all calls of a script begin with, in bytes: redis-py need not encode it each time.
        self._heads = {
            name: (_digest(source), str(len(keys)).encode(), *(key.encode() for key in keys))
            for name, source in sources.items()
        }
        self._timeout_s = timeout_s
        self._waiting: deque[_Call] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def call(self, script: str, arguments: Sequence[Argument]) -> Any:
        """Return one script's reply, as Redis gives it. A caller that leaves before it is sent costs nothing.

        Raises what redis-py does, and TimeoutError. Where a batch fails, so do those that wait behind
        it: none of them waits for a silent server longer than `timeout_s`.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call(script, arguments, reply))
        if self._sender is None or self._sender.done():
            self._sender = spawn(self._send(), "redis-calls")
        return await reply

    async def close(self) -> None:
        """Give up what is under way."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait({self._sender})

    async def _send(self) -> None:
        batch: list[_Call] = []
        try:
            while batch := self._next():
                try:
                    replies = await patiently(self._run(batch), self._timeout_s)
                except (RedisError, OSError, TimeoutError) as error:
                    redis_link.renew(self._client)
                    replies = [error] * (len(batch) + len(self._waiting))
                    batch += self._waiting
                    self._waiting.clear()
                for call, reply in zip(batch, replies, strict=True):
                    if call.reply.done():
                        continue  # its caller has left
                    if isinstance(reply, Exception):
                        call.reply.set_exception(reply)
                    else:
                        call.reply.set_result(reply)
        finally:
            # Calls are left only if this task is cancelled or ends with a bug. Fail them rather than cancel
            # them, because a cancelled task ends for good.

            for call in (*batch, *self._waiting):
                if not call.reply.done():
                    call.reply.set_exception(RedisError("the call was given up"))
            self._waiting.clear()

    def _next(self) -> list[_Call]:
        """Take the next calls whose callers still wait."""
        batch: list[_Call] = []
        while self._waiting and len(batch) < BATCH_CALLS:
            call = self._waiting.popleft()
            if not call.reply.done():
                batch.append(call)
        return batch

    async def _run(self, batch: Sequence[_Call]) -> list[Any]:
        """Return each call's reply or error. A server that lacks a script has not run it: once more."""
        replies = await self._ask(batch)
        again = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if again:
            calls = [batch[at] for at in again]
            scripts = dict.fromkeys(call.script for call in calls)
            for at, reply in zip(again, await self._ask(calls, scripts), strict=True):
                replies[at] = reply
        if any(isinstance(reply, Exception) for reply in replies):
            redis_link.renew(self._client)  # this may be the wrong server by now
        return replies

    async def _ask(self, calls: Sequence[_Call], load: Iterable[str] = ()) -> list[Any]:
        loads = list(load)
        async with self._client.pipeline(transaction=False) as pipe:
            for script in loads:
                pipe.execute_command("SCRIPT LOAD", self._sources[script])
            for call in calls:
                pipe.execute_command("EVALSHA", *self._heads[call.script], *call.arguments)
            return (await pipe.execute(raise_on_error=False))[len(loads) :]


def _digest(source: str) -> bytes:
    return sha1(source.encode()).hexdigest().encode()  # noqa: S324 (Redis')
