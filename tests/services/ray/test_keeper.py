"""The keeper of a node, which needs no Ray: it is a plain class that starts `baton node`."""

import contextlib
import errno
import io
import json
import os
import shutil
import socket
import subprocess

import psutil
import pytest

from baton.services.config import REVEAL, load
from baton.services.fleet.node import PartOrder
from baton.services.ray import keeper as keeper_module
from baton.services.ray.keeper import Keeper
from harness.support import eventually, listening


@pytest.fixture
def keeper(tmp_path):
    one = Keeper(str(tmp_path), str(tmp_path))
    yield one
    one.end()


def scheduler(port):
    settings = load({"scheduler": {"address": f"127.0.0.1:{port}"}}).model_dump(mode="json", context=REVEAL)
    return PartOrder("scheduler", "scheduler", settings).to_json()


def nodes():
    found = []
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):  # another test started it
            if "--orders" in " ".join(one.cmdline()):
                found.append(one)
    return found


def until(keeper, states, what):
    """Wait until the keeper reports these states; return what was said until then."""
    said = []

    def so():
        report = keeper.report()
        assert not report.failed
        said.extend(report.said)
        return report.states == states

    eventually(so, 20, what)
    return said


def test_a_node_that_dies_is_started_again_with_its_parts(keeper):
    port = keeper.port("127.0.0.1")
    assert port != keeper.port("127.0.0.1")
    keeper.run(0, [scheduler(port)])
    eventually(lambda: listening(port), 20, "the scheduler listens on the reserved port")
    (first,) = nodes()
    first.kill()
    eventually(lambda: not listening(port), 10, "its parts die with it")
    until(keeper, {"scheduler": "running"}, "it runs again")
    eventually(lambda: listening(port), 20, "it listens again")
    assert keeper.report().order == 0


def test_a_start_without_room_for_a_process_is_tried_again(keeper, tmp_path, monkeypatch):
    """It also survives a cleaner that removes its log folder."""
    start, left = subprocess.Popen, [1]

    def failing(*args, **options):
        if left[0]:
            left[0] -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(*args, **options)

    monkeypatch.setattr(keeper_module, "RETRY_S", 0.1)
    monkeypatch.setattr(subprocess, "Popen", failing)
    shutil.rmtree(tmp_path / socket.gethostname())
    keeper.run(0, [scheduler(keeper.port("127.0.0.1"))])
    said = until(keeper, {"scheduler": "running"}, "it runs")
    assert said[0] == ("node", "not started: Resource temporarily unavailable; retrying in 0.1 s")


def test_what_a_library_prints_among_the_events_does_no_harm(keeper):
    """The pipe must still be read, or the node would block."""

    class Printed:
        stdout = io.StringIO(f"warning: odd\n{json.dumps({'event': 'said', 'name': 'a', 'text': 'b'})}\n")

    keeper._hear(Printed())
    assert keeper.report().said == [("node", "warning: odd"), ("a", "b")]


def test_a_taken_port_is_reported_before_a_part_starts(keeper):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        why = keeper.why_not("router.port", "127.0.0.1", port)
        assert f"router.port: cannot listen on 127.0.0.1:{port}: Address already in use" in why
    assert keeper.why_not("router.port", "127.0.0.1", port) == ""
    assert "192.0.2.7" in keeper.why_not("router.port", "192.0.2.7", port)  # not an address of this machine


def test_an_order_of_nothing_ends_the_parts(keeper):
    port = keeper.port("127.0.0.1")
    keeper.run(0, [])
    assert nodes() == []  # nothing to do: no process
    keeper.run(1, [scheduler(port)])
    eventually(lambda: listening(port), 20, "the scheduler listens")
    keeper.run(2, [])
    said = until(keeper, {}, "it has ended")
    assert said == [("scheduler", "started"), ("scheduler", "ended")]


def test_a_node_gets_the_priority_of_ray_itself(keeper):
    """Ray gives its workers, and so their children, a low one."""
    node = subprocess.Popen(["nice", "-n", "5", "sleep", "60"])
    try:
        eventually(lambda: psutil.Process(node.pid).nice() > psutil.Process(os.getppid()).nice(), 5, "low")
        keeper._raise_priority(node.pid)
        said = [text for _, text in keeper.report().said]
        nice = os.getpriority(os.PRIO_PROCESS, node.pid)
    finally:
        node.kill()
        node.wait()
    mine = os.getpriority(os.PRIO_PROCESS, os.getppid())
    assert nice == mine or (os.geteuid() != 0 and "start Ray with RAY_worker_niceness=0" in said[0])
