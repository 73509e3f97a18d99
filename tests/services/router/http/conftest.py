"""Routers in their own processes, and a small server behind the router's connections."""

import pytest

from harness import zygote
from harness.checkpoints import tiny_qwen2
from harness.doors import Seen, serving
from harness.router import Members
from harness.scheduling import until
from harness.support import PATIENCE, eventually, listening
from tests.services.router.http.site import SHORT, START_S, Site, run_scheduler

FAST = {
    "baton.services.router.cluster:FRESH_S": 0.05,  # /health soon knows of a change
    "baton.services.tenants.shared:CALL_S": 2.0,  # the machine may be busy
}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start_router(model):
    """Return a function that starts a router for the tiny model; its output goes to FOLDER/router.log."""
    started = []

    def start(folder, environment=None, constants=None, **settings):
        folder.mkdir(exist_ok=True)
        settings["engine"] = {"model": str(model), **settings.get("engine", {})}
        arguments = {"kind": "router", "settings": settings, "environment": environment or {}}
        arguments["constants"] = FAST | (constants or {})
        started.append(zygote.shared().start("router", "harness.forked:run", folder, **arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
async def server():
    async with serving(Seen()) as one:
        yield one


@pytest.fixture(scope="module")
def site(start_router, tmp_path_factory):
    more = {"drain_timeout_s": 1.5 * PATIENCE, "log_level": "info"}
    return Site(start_router, tmp_path_factory.mktemp("router"), constants=SHORT, **more)


@pytest.fixture(scope="module")
def scheduler(site, tmp_path_factory):
    """Run one scheduler for all tests, because finding another takes a second; yield its address."""
    folder, address = tmp_path_factory.mktemp("scheduler"), f"127.0.0.1:{site.scheduler_port}"
    call = f"{run_scheduler.__module__}:run_scheduler"
    process = zygote.shared().start("scheduler", call, folder, address=address)
    eventually(lambda: listening(site.scheduler_port), START_S, "the scheduler listens")
    yield address
    process.kill()


@pytest.fixture
async def http(site):
    async with site.client() as client:
        yield client


@pytest.fixture
async def members(scheduler, http):
    async with Members(scheduler) as members:
        yield members

    async def gone():  # the router keeps its last snapshot for a moment, and would place on them
        return "worker" in (await http.get("/health")).text

    await until(gone, 10)
