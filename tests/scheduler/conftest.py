import asyncio
import json
import sys
import uuid
from contextlib import asynccontextmanager
from functools import partial

import grpc.aio
import pytest

from baton.protos import scheduler_pb2 as pb
from baton.protos import worker_pb2, worker_pb2_grpc
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import StoreRefuses
from baton.scheduler.ledger import Ledger
from baton.scheduler.roster import Roster
from baton.scheduler.service import SchedulerServer
from baton.scheduler.store import open_store
from baton.scheduler.store.base import MemoryStore
from baton.scheduler.store.redis import RedisStore
from harness.scheduling import Clock, Options, RedisServer, until, working
from harness.support import PATIENCE, free_port

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


@asynccontextmanager
async def opened(url, count=2):
    """Open the stores of schedulers."""
    made = []
    try:
        for _ in range(count):
            made.append(open_store(url, "t"))
            await made[-1].open()
            assert not made[-1].problem
        yield made
    finally:
        for store in made:
            await store.close()


async def refused(url, match):
    """Check that the store does not open; return the reason."""
    with pytest.raises(StoreRefuses, match=match) as caught:
        async with opened(url):
            pass
    return str(caught.value)


async def recovered(stores, within_s=5.0):
    """Wait until all stores have Redis again."""

    async def well():
        for store in stores:
            await store.tend()
        return not any(store.problem for store in stores)

    await until(well, within_s)


@pytest.fixture
async def server(topic):
    async with SchedulerServer(Options(topic=topic, worker_lease_s=60.0)) as running:
        yield running


@pytest.fixture
async def client(server):
    async with SchedulerClient(server.address, router_id="router") as made:
        yield made


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


class Schedulers:
    """Two schedulers that begin and end one by one."""

    def __init__(self, **options):
        self.options = [Options(f"127.0.0.1:{free_port()}", **options) for _ in range(2)]
        self.addresses = [one.address for one in self.options]
        self.servers = {}

    async def begin(self, number):
        self.servers[number] = await SchedulerServer(self.options[number]).__aenter__()
        return self.servers[number]

    async def end(self, number):
        await self.servers.pop(number).__aexit__(None, None, None)

    async def close(self):
        for number in list(self.servers):
            await self.end(number)

    def workers(self, number):
        """Return the workers that a scheduler knows, by id."""
        return self.servers[number]._servicer.roster.view().workers


class Changer(worker_pb2_grpc.WorkerServicer):
    """A worker without an engine, which changes its role unless `refusal` says why not."""

    def __init__(self):
        self.refusal = ""
        self.asked = []  # (role, fence)

    @asynccontextmanager
    async def registered(self, client, who):
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        who.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with working(client, who, partial(pb.WorkerLoad, free_blocks=99)) as self.session:
            yield self
        await server.stop(None)

    async def SetRole(self, request, context):
        del context
        self.asked.append((request.role, request.fence))
        if not self.refusal:
            await self.session.become(request.role)
        return worker_pb2.SetRoleReply(refusal=self.refusal)
