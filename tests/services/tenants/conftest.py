from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from baton.services.tenants import shared
from baton.services.tenants.shared import SharedStore
from harness.scheduling import RedisServer


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), password="s3cret")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """Yield a Redis that the test may stop."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def topic() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeout of calls: on a busy machine 0.5 s may be too short."""
    monkeypatch.setattr(shared, "CALL_S", 10.0)


@pytest.fixture
async def share(topic: str) -> AsyncIterator[Callable[[RedisServer], Awaitable[SharedStore]]]:
    """Yield a function that connects another router to a Redis."""
    made: list[SharedStore] = []

    async def another(server: RedisServer) -> SharedStore:
        made.append(SharedStore(server.url, topic))
        made[-1].start()
        return made[-1]

    yield another
    for one in made:
        await one.close()
