"""`baton node`: it runs what its owner orders, restarts what dies, and ends with its owner.

The parts are schedulers: real processes that need no model. tests/e2e/test_ray_hosts.py runs workers.
"""

import json
import os
import signal
import socket
from dataclasses import replace

import psutil
import pytest

from baton.services.config import REVEAL, load
from baton.services.fleet import children, node
from baton.services.fleet.devices import Cores
from baton.services.fleet.node import PartOrder
from harness.ray_forks import fork_node
from harness.support import CALL_S, eventually, free_port, gone, listening
from harness.zygote import shared


class Owner:
    def __init__(self, folder):
        python = ["python", "-P", "-m"]
        command = [*python, "baton.services.cli.main", "node", "--orders", "--log-dir", str(folder)]
        with (folder / "node.log").open("ab") as log:
            self.process = fork_node(command, stderr=log, env=os.environ, cwd=None)
        self.said = []

    def order(self, *parts):
        print(json.dumps([part.to_json() for part in parts]), file=self.process.stdin, flush=True)

    def until(self, **states):
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "said":
                self.said.append(f"{event['name']}: {event['text']}")
            elif event["states"] == states:
                return
        raise AssertionError(f"it ended without {states}; it said {self.said}")

    @property
    def children(self):
        return psutil.Process(self.process.pid).children()


@pytest.fixture
def owner(tmp_path):
    one = Owner(tmp_path)
    yield one
    one.process.kill()
    one.process.wait(CALL_S)
    one.process.stdout.close()
    one.process.stdin.close()


def ordered(name, role, **sections):
    return PartOrder(name, role, load(sections).model_dump(mode="json", context=REVEAL))


def scheduler(name, port):
    return ordered(name, "scheduler", scheduler={"address": f"127.0.0.1:{port}"})


def test_it_runs_what_is_ordered_and_restarts_what_dies(owner):
    one, other = scheduler("one", free_port()), scheduler("other", free_port())
    owner.order(one, other)
    owner.until(one="running", other="running")
    pids = {child.pid for child in owner.children}
    owner.order(other)  # the other part keeps running
    owner.until(other="running")
    (left,) = owner.children
    assert left.pid in pids
    left.kill()
    eventually(lambda: len(owner.children) == 1 and left not in owner.children, 10, "it is restarted")
    owner.order(one, other)
    owner.until(one="running", other="running")
    assert not {child.pid for child in owner.children} & pids


def test_a_port_that_is_taken_meanwhile_is_waited_for(owner, tmp_path):
    """For example, an outgoing connection may have got it."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        owner.order(scheduler("one", port))
        owner.until(one="running")
        log = tmp_path / "one.log"
        eventually(lambda: "is taken; waiting for it" in log.read_text(), 10, "it waits")
    eventually(lambda: listening(port), 10, "it serves")
    owner.order(scheduler("one", port), scheduler("two", free_port()))
    owner.until(one="running", two="running")
    assert not any("died" in line for line in owner.said)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param(lambda process: process.terminate(), 0, id="a signal"),
        pytest.param(lambda process: process.send_signal(signal.SIGHUP), 0, id="its terminal's end"),
        pytest.param(lambda process: process.stdin.close(), 1, id="the owner's end"),
        pytest.param(lambda process: process.kill(), -signal.SIGKILL, id="its own end"),
    ],
)
def test_nothing_is_left(owner, end, status):
    owner.order(scheduler("one", free_port()))
    owner.until(one="running")
    children = owner.children
    end(owner.process)
    assert owner.process.wait(CALL_S) == status
    eventually(lambda: gone(children), 10, "its children have ended")


def test_without_workers_and_orders_the_error_says_what_to_give():
    done = shared().command("node")
    given = "baton: error: give either workers to run (--prefill, --decode, --mixed, --encode)"
    assert (done.returncode, done.stderr[: len(given)]) == (1, given)


def test_a_worker_is_started_again_with_the_role_that_it_was_ordered_last(tmp_path, monkeypatch):
    """Its process looks the role up when it starts: an autoscaler or an operator may have changed it."""
    asked = []
    monkeypatch.setattr(children, "Worker", lambda _tree, _name, role, _where: asked.append(role))
    monkeypatch.setattr(node, "wake_on_signals", lambda: None)
    one = node._Node(tmp_path, print, listen=False)
    order = ordered("decode-0", "decode")
    one._wanted = {"decode-0": order}
    one._work(order)
    assert asked[0]() == "decode"
    one._wanted = {"decode-0": replace(order, role="prefill")}
    assert asked[0]() == "prefill"
    one._wanted = {}  # it leaves, and may die before
    assert asked[0]() == "decode"


def test_workers_have_their_drain_time(tmp_path, monkeypatch):
    """Routers on other machines use them."""
    monkeypatch.setattr(node, "wake_on_signals", lambda: None)
    one = node._Node(tmp_path, print, listen=False)
    one._running = {"decode-0": ordered("decode-0", "decode", worker={"drain_timeout_s": 42.0})}
    stopped = []
    monkeypatch.setattr(one._parts, "stop", lambda *seconds: stopped.append(seconds))
    one._end()
    assert stopped == [(0.0, 42.0)]


def test_what_is_ordered_away_during_the_import_is_not_started(tmp_path, monkeypatch):
    """An autoscaler may change its orders during those ten seconds. Nothing is imported for routers."""
    orders, owner = os.pipe()
    stop, waker = socket.socketpair()
    monkeypatch.setattr(node, "_STDIN", orders)
    monkeypatch.setattr(node, "wake_on_signals", lambda: stop)
    imported = []

    def preload(*_, **kinds):
        imported.append(kinds)
        os.write(owner, b"[]\n")

    monkeypatch.setattr(children, "preload", preload)
    monkeypatch.setattr(children, "Worker", lambda *_: signal.pause)
    one = node._Node(tmp_path, print, listen=True)
    order = ordered("decode-0", "decode")
    one._wanted = {"decode-0": order}
    try:
        one._reconcile()
        assert not one._parts.members
        one._wanted = {"decode-0": order}  # again, after the import
        one._reconcile()
        assert [part.name for part in one._parts.members] == ["decode-0"]
        assert imported == [{"workers": True, "routers": False}]
    finally:
        one._parts.stop(0.0)
        os.close(orders)
        os.close(owner)
        stop.close()
        waker.close()


def test_cores_are_lent_evenly(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    cores = Cores()
    assert [cores.lend(2), cores.lend(1), cores.lend(1)] == ["0,1", "2", "3"]
    assert cores.lend(9) == "0,1,2,3"  # no more than there are
    cores.take_back("2")
    assert (cores.lend(1), cores.lend(0)) == ("2", "")
    cores.take_back("")
