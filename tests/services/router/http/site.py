"""A router, its scheduler, and pairs of fake workers that serve."""

import asyncio
import contextlib
import json
import time

import httpx

from baton.protos import scheduler_pb2 as pb
from baton.scheduler import placer, service, servicer
from baton.scheduler.roster import Settling
from baton.scheduler.service import SchedulerServer
from baton.services.tenants.model import ApiKey, digest
from harness.fake_worker import MODEL, FakeWorker, Seen, answer
from harness.router import Members
from harness.scheduling import until, usual
from harness.support import eventually, free_port, listening

START_S = 60.0
MAX_WAIT_S = 2.0  # limit of the shared router: tests with busy workers wait that long
SHORT = {
    "baton.services.config.router:WAIT_SHARE": MAX_WAIT_S / 600,
    "baton.services.config.router:REPLACE_SHARE": 1 / 600,
}
PROMPT = [72, 105]
# Pairs stay pairs: no idle decode worker prefills.
SCHEDULER = {"placement_lease_s": 2.0, "max_queue_factor": 1.0, "idle_decode_tokens": 0}


def api_key(secret, tenant, **limits):
    return ApiKey(tenant=tenant, sha256=digest(secret.encode()).hex(), **limits)


def run_scheduler(address):
    servicer.SNAPSHOT_AGE_S = 0.05  # the router soon knows of a change
    placer.VIEW_AGE_S = 0.0  # the next request can be placed on a worker that has just registered
    # A new scheduler may not know all workers yet. While it says so, routers place from their last snapshot
    # where it finds no room, and that one may be older than half of a test's pair.
    service.Settling = lambda _settle_s: Settling(0.0)
    asyncio.run(service.serve(usual(address=address, **SCHEDULER)))


class Site:
    def __init__(self, start_router, folder, environment=None, constants=None, **router):
        self.port, self.scheduler_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = start_router(
            folder,
            environment,
            constants,
            engine={"served_model_name": MODEL, "tool_call_parser": "hermes"},
            scheduler={"address": f"127.0.0.1:{self.scheduler_port}"},
            router={"port": self.port, **router},
        )
        eventually(lambda: listening(self.port), START_S, "the router listens")

    def client(self):
        return httpx.AsyncClient(base_url=self.url, timeout=START_S)

    @contextlib.asynccontextmanager
    async def scheduler(self):
        settings = usual(address=f"127.0.0.1:{self.scheduler_port}", **SCHEDULER)
        async with SchedulerServer(settings) as server, Members(server.address) as members:
            yield members


def body(max_tokens=8, **more):
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, **more}


def text(count, begin=0):
    return bytes(answer(PROMPT, count, begin)).decode()


async def pair(members, http, *, step_s=0.002, max_num_seqs=256):
    workers = [
        FakeWorker(f"{name}.{time.monotonic_ns()}", role, step_s=step_s, max_num_seqs=max_num_seqs)
        for name, role in (("p", pb.ROLE_PREFILL), ("d", pb.ROLE_DECODE))
    ]
    return await serving(members, http, *workers)


async def serving(members, http, *workers):
    """Add both workers, wait until a request has passed through them, and forget what they saw of it.

    Either one serves alone while the router or its scheduler does not see the other, which may last past the
    first request on a busy machine. A fault meant for that request would then hit another one.
    """
    for worker in workers:
        await members.add(worker)
    await until(lambda: healthy(http), START_S)

    async def through_both():
        got = await http.post("/v1/completions", json=body(2))
        assert got.status_code == 200, got.text
        prefilled, decoded = ({start.request_id for start in one.seen.starts} for one in workers)
        return bool(prefilled & decoded)

    await until(through_both, START_S)
    for worker in workers:
        worker.seen = Seen()
    return list(workers)


async def events(response):
    lines = [line async for line in response.aiter_lines()]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


async def healthy(client, **model):
    try:
        return (await client.get("/health", params=model)).status_code == 200
    except httpx.ConnectError:  # it is starting
        return False
