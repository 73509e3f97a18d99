"""Background tasks, and calls with a timeout."""

import asyncio
from contextvars import ContextVar

import pytest

from baton.tasks import patiently, spawn, spawn_apart, stop

REQUEST = ContextVar("request", default="none")


async def test_an_exception_is_logged_and_a_stop_is_not(caplog):
    async def fails():
        raise RuntimeError("a bug")

    failing = spawn(fails(), "sweeper")
    await asyncio.wait({failing})
    await stop(failing)  # does not raise
    waiting = spawn(asyncio.sleep(60), "waiter")
    await stop(waiting)
    assert waiting.cancelled()
    assert [one.getMessage() for one in caplog.records] == ["sweeper ended by a bug"]


async def test_a_task_has_no_context():
    async def seen():
        return REQUEST.get()

    REQUEST.set("r")
    assert await spawn_apart(seen(), "apart") == "none"


async def test_a_slow_call_is_cancelled():
    ended = asyncio.Event()

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def refused():
        raise ConnectionRefusedError

    with pytest.raises(TimeoutError):
        await patiently(slow(), 0.02)
    assert ended.is_set()
    with pytest.raises(ConnectionRefusedError):
        await patiently(refused(), 60)
    assert await patiently(asyncio.sleep(0, "answer"), 60) == "answer"
