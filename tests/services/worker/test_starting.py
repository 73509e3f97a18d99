"""A member of a gang whose work fails because another one ended says so."""

import asyncio
from types import SimpleNamespace

import pytest

from baton.services.engine.errors import SiblingLost
from baton.services.errors import StartError
from baton.services.worker import starting


async def failing():
    raise StartError("connection closed by peer")


@pytest.mark.parametrize("lost", [False, True])
async def test_a_load_that_fails_with_the_gang(lost, monkeypatch):
    monkeypatch.setattr(starting, "CAUSE_S", 10.0 if lost else 0.0)
    link = SimpleNamespace(lost=asyncio.get_running_loop().create_future(), missing="")

    def check():
        if link.lost.done():
            raise SiblingLost("gang g is over")

    gang = SimpleNamespace(link=link, check=check)
    loading = asyncio.ensure_future(failing())
    await asyncio.wait([loading])
    if lost:
        asyncio.get_running_loop().call_later(0.01, link.lost.set_result, "rank 1 ended")
    with pytest.raises(SiblingLost if lost else StartError, match="over" if lost else "closed by peer"):
        await starting.unless_stopped(loading, "loading", asyncio.Event(), gang)


async def test_a_gang_does_not_load_for_ever(monkeypatch):
    monkeypatch.setattr(starting, "PROGRESS_EVERY_S", 0.01)
    monkeypatch.setattr(starting, "LOADING_S", 0.02)
    loop = asyncio.get_running_loop()
    gang = SimpleNamespace(link=SimpleNamespace(lost=loop.create_future(), missing=""))
    loading = loop.create_future()
    with pytest.raises(StartError, match="ports between them"):
        await starting.unless_stopped(loading, "loading", asyncio.Event(), gang)
