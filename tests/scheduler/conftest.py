import asyncio
import json
import sys
import uuid
from contextlib import asynccontextmanager

import pytest

from baton.scheduler.ledger import Ledger
from baton.scheduler.roster import Roster
from baton.scheduler.store.memory import MemoryStore
from baton.scheduler.store.redis import RedisStore
from harness.scheduling import Clock, RedisServer
from harness.support import PATIENCE

WORKER_LEASE_S = 5.0
BOOKING_LEASE_S = 15.0


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis"), password="s3cret") as server:
        yield server


@pytest.fixture
def own_redis(tmp_path):
    """A server that the test may kill."""
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def topic():
    return f"t-{uuid.uuid4().hex[:8]}"


@pytest.fixture(params=["memory", "redis"])
async def store(request, topic):
    if request.param == "memory":
        made = MemoryStore()
    else:
        made = RedisStore(request.getfixturevalue("redis_server").url, topic)
    yield made
    await made.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(clock):
    return Ledger(BOOKING_LEASE_S, clock)


@pytest.fixture
def roster(ledger, clock):
    return Roster("topic", WORKER_LEASE_S, ledger, clock)


PROGRAM = """
import asyncio, sys
from baton.scheduler.service import serve
from baton.services.config import SchedulerSettings
settings = SchedulerSettings.model_validate_json(sys.argv[1])
asyncio.run(serve(settings, on_started=lambda address: print(address, flush=True)))
"""


@asynccontextmanager
async def scheduler_process(**settings):
    """Run a scheduler in its own process; yield the process and the scheduler's address."""
    arguments = ("-c", PROGRAM, json.dumps({"address": "127.0.0.1:0"} | settings))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    try:
        async with asyncio.timeout(60 * PATIENCE):
            address = (await process.stdout.readline()).decode().strip()
        yield process, address
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
