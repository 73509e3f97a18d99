"""A router of two processes on one port, in front of fake workers and a real scheduler."""

import asyncio
import errno
import os
import re
import signal
import socket

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.service import SchedulerServer
from baton.services.config import RouterSettings, SchedulerSettings, load
from baton.services.errors import ConfigError
from baton.services.fleet.routers import run_routers, share
from harness import zygote
from harness.checkpoints import tiny_qwen2
from harness.fake_worker import MODEL, FakeWorker, answer, until
from harness.router import Members
from harness.support import CALL_S, PATIENCE, free_port, freeze, signals_of

PROMPT = [72, 105]
TOKENS = 60
SLOW_S, QUICK_S = 0.3, 0.01  # per step: streams that last, even on a busy machine, and streams that end
READY_S = 60.0
END_S = 20.0
PLAIN = httpx.Limits(max_keepalive_connections=0)  # each request has a connection of its own
OK = b"HTTP/1.1 200 OK"
TEXT = "".join(chr(letter) for letter in answer(PROMPT, TOKENS))


def run(settings):
    run_routers(load(settings))


class Routers:
    def __init__(self, forked, port, worker):
        self.forked = forked
        self.port = port
        self.worker = worker
        self.url = f"http://127.0.0.1:{port}"

    @property
    def pids(self):
        return {child.pid for child in psutil.Process(self.forked.pid).children()}

    def listens(self):
        return len(re.findall(r"router \d+ listens on", self.forked.text))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def workers():
    settings = SchedulerSettings(address="127.0.0.1:0")
    async with SchedulerServer(settings) as server, Members(server.address) as members:
        worker = await members.add(FakeWorker("m0", pb.ROLE_MIXED, step_s=SLOW_S))
        yield server.address, worker


@pytest.fixture
def routers(workers, model, tmp_path):
    port = free_port()
    settings = {
        "engine": {"model": str(model), "served_model_name": MODEL},
        "scheduler": {"address": workers[0]},
        "router": {"port": port, "processes": 2, "drain_timeout_s": 30.0},
    }
    forked = zygote.shared().start("router", f"{__name__}:run", tmp_path, settings=settings)
    yield Routers(forked, port, workers[1])
    print(forked.text)  # shown if the test fails
    forked.kill()


@pytest.fixture
async def http(routers):
    async with httpx.AsyncClient(base_url=routers.url, timeout=30.0 * PATIENCE, limits=PLAIN) as client:
        yield client


class Stream:
    def __init__(self, http):
        self.text = ""
        self.whole = False
        self.lost = False
        self.task = asyncio.create_task(self._read(http))

    async def _read(self, http):
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        self.whole = True
                    elif found := re.search(r'"text":"([^"]*)"', line):
                        self.text += found[1]
        except httpx.RemoteProtocolError:  # its process was killed
            self.lost = True


async def streaming(http):
    streams = [Stream(http) for _ in range(16)]
    await until(lambda: all(one.text for one in streams), "all streams have begun")
    return streams


async def metrics(http):
    found = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            key = sample.name, sample.labels["process"]
            found[key] = found.get(key, 0.0) + sample.value
    return found


async def knock(http, seen, over):
    """Open one connection after another. Raises if one is refused or reset."""
    while not over.is_set():
        seen.append((await http.get("/v1/models")).status_code)
        await asyncio.sleep(0.02)


def connected(routers, count):
    """Return connections that have sent a request each, whether accepted or not."""
    made = []
    for _ in range(count):
        made.append(socket.create_connection(("127.0.0.1", routers.port), timeout=20.0 * PATIENCE))
        made[-1].sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return made


def refused(routers):
    """Return whether a new client is refused, rather than left waiting."""
    with socket.socket() as client:
        client.settimeout(0.5)
        return client.connect_ex(("127.0.0.1", routers.port)) == errno.ECONNREFUSED


async def statuses(connections):
    """Return the status lines of the answers. Raises ConnectionResetError."""

    def read(one):
        with one:
            return one.recv(100).partition(b"\r\n")[0]

    return set(await asyncio.gather(*(asyncio.to_thread(read, one) for one in connections)))


async def serving(routers, http, times):
    """Wait until this many processes have begun to serve, and the router is healthy."""
    await until(lambda: routers.listens() >= times, f"{times} processes serve", READY_S)
    for _ in range(int(100 * PATIENCE)):
        if (await http.get("/health")).status_code == 200:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not healthy")


async def test_when_one_dies_the_other_continues(routers, http):
    await serving(routers, http, 2)
    before = routers.pids
    assert len(before) == 2

    streams = await streaming(http)
    found = await metrics(http)
    live = [found["baton_router_live_requests", number] for number in ("0", "1")]
    assert sum(live) == 16
    # 16 connections all go to one process once in 32,768 runs, but a slow process leaves its own to the
    # other.
    while not min(live):
        streams.append(Stream(http))
        await until(lambda: all(one.text for one in streams), "the next one has begun")
        found = await metrics(http)
        live = [found["baton_router_live_requests", number] for number in ("0", "1")]
        assert len(streams) < 64

    victim = min(before)
    freeze(victim)  # half of these wait for it, and the other process accepts them
    assert await statuses(connected(routers, 32)) == {OK}
    waiting = connected(routers, 32)
    os.kill(victim, signal.SIGKILL)
    assert await statuses(waiting) == {OK}
    seen = []
    over = asyncio.Event()
    knocking = [asyncio.create_task(knock(http, seen, over)) for _ in range(4)]
    routers.worker.step_s = QUICK_S
    for one in streams:
        await one.task
    assert {one.text for one in streams if not one.lost} == {TEXT}
    assert 0 < sum(one.lost for one in streams) < len(streams)
    assert all(one.whole for one in streams if not one.lost)

    await until(lambda: routers.listens() >= 3, "the process is started again", READY_S)
    assert before - routers.pids == {victim}
    over.set()
    await asyncio.gather(*knocking)
    assert set(seen) == {200}

    after = [Stream(http) for _ in range(16)]
    for one in after:
        await one.task
        assert one.text == TEXT
    found = await metrics(http)
    done = {number: found["baton_router_requests_total", number] for number in ("0", "1")}
    lost = sum(one.lost for one in streams)
    assert sum(done.values()) == len(streams) + len(after) - lost  # the victim's own count is gone with it
    assert {found["baton_process_up", number] for number in ("0", "1")} == {1}


async def test_nothing_is_reset_when_it_ends(routers, http):
    """First one process, as in a rolling restart, then all: streams finish, and no connection is reset."""
    await serving(routers, http, 2)
    streams = await streaming(http)
    seen = []
    over = asyncio.Event()
    knocking = [asyncio.create_task(knock(http, seen, over)) for _ in range(4)]

    leaver = min(routers.pids)
    freeze(leaver)
    waiting = connected(routers, 32)
    for number in (signal.SIGTERM, signal.SIGCONT):
        os.kill(leaver, number)
    assert await statuses(waiting) == {OK}
    await until(lambda: len(seen) > 50, "it drains while others come")
    assert not any(one.task.done() for one in streams)
    routers.worker.step_s = QUICK_S
    await until(lambda: leaver not in routers.pids, "it has drained", 30.0)
    for one in streams:
        await one.task
        assert (one.text, one.whole) == (TEXT, True)
    over.set()
    await asyncio.gather(*knocking)
    assert set(seen) == {200}

    await serving(routers, http, 3)
    routers.worker.step_s = SLOW_S
    streams = await streaming(http)
    last = routers.pids
    for pid in last:
        freeze(pid)
    waiting = connected(routers, 32)
    routers.forked.terminate()
    for pid in last:
        os.kill(pid, signal.SIGCONT)
    assert await statuses(waiting) == {OK}
    assert not any(one.task.done() for one in streams)
    routers.worker.step_s = QUICK_S
    for one in streams:
        await one.task
        assert (one.text, one.whole) == (TEXT, True)
    assert routers.forked.wait(END_S * PATIENCE) == 0
    assert not any(psutil.pid_exists(pid) for pid in last)


async def test_nobody_waits_for_a_process_that_is_gone_before_its_drain(routers, http):
    """It crashes, or is still starting, when all end. While the other drains, new clients are refused."""
    await serving(routers, http, 2)
    gone, draining = routers.pids
    freeze(gone)  # it does not get the SIGTERM

    reader, writer = await asyncio.open_connection("127.0.0.1", routers.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), CALL_S)).startswith(OK)
    writer.write(b"POST /v1/completions HTTP/1.1\r\n")  # incomplete: its process waits for the rest
    routers.forked.terminate()
    await until(lambda: signal.SIGTERM in signals_of(gone, "ShdPnd"), "the end has begun")
    os.kill(gone, signal.SIGKILL)
    await until(lambda: refused(routers), "new clients are refused", 5.0)
    assert draining in routers.pids
    writer.close()
    await writer.wait_closed()
    assert routers.forked.wait(END_S * PATIENCE) == 0


def test_the_parts_of_the_limits_are_the_whole():
    whole = RouterSettings(processes=3, max_waiting=100, metrics_port=9000)
    parts = [share(whole, number) for number in range(3)]
    assert sum(one.max_waiting for one in parts) == 100
    assert [one.metrics_port for one in parts] == [9000, 9001, 9002]
    assert {share(RouterSettings(processes=2, max_waiting=0), number).max_waiting for number in (0, 1)} == {0}


def test_what_does_not_suit_several_processes_is_refused():
    with pytest.raises(ConfigError, match=r"router\.processes"):
        load({"router": {"processes": 65}})
    settings = load({"router": {"processes": 2}, "security": {"tls": True, "folder": "/tmp/none"}})
    with pytest.raises(ConfigError, match=r"security\.folder"):
        run_routers(settings)
