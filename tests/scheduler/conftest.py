from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.scheduler.ledger import Ledger
from baton.scheduler.roster import Roster
from baton.scheduler.store import Store
from baton.scheduler.store.memory import MemoryStore
from baton.scheduler.store.redis import RedisStore
from harness.scheduling import Clock, RedisServer

WORKER_LEASE_S = 5.0
BOOKING_LEASE_S = 15.0


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), password="s3cret")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def topic() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, topic: str) -> AsyncIterator[Store]:
    """Return an empty store of each kind."""
    made: Store
    if request.param == "memory":
        made = MemoryStore()
    else:
        made = RedisStore(request.getfixturevalue("redis_server").url, topic)
    yield made
    await made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    return Ledger(BOOKING_LEASE_S, clock)


@pytest.fixture
def roster(ledger: Ledger, clock: Clock) -> Roster:
    return Roster("topic", WORKER_LEASE_S, ledger, clock)
