"""Parts that are new programs, because CUDA is initialised here: their arguments reach them."""

import os
import pickle
import signal
from functools import partial
from multiprocessing import Pipe

import psutil
import pytest

from baton.services.config import load
from baton.services.fleet import children, processes
from baton.services.fleet.devices import Devices
from baton.services.fleet.parts import Kind, Parts
from baton.services.fleet.watch import Watched
from baton.services.models import models_of
from harness.support import PATIENCE, eventually, free_port, listening

BEGUN_S = 30.0  # a new Python, on a busy machine


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr(processes, "cuda_begun", lambda: True)
    return []


@pytest.fixture
def parts(tmp_path, said):
    one = Parts(tmp_path, lambda name, text: said.append(f"{name}: {text}"))
    yield one
    one.stop(0.0)


def process(part):
    return psutil.Process(part.child.process.pid)


def test_a_scheduler_serves_is_restarted_and_ends(parts, said, tmp_path):
    port = free_port()
    settings = load({"scheduler": {"address": f"127.0.0.1:{port}"}})
    part = parts.add("scheduler", Kind.SCHEDULER, partial(children.scheduler, settings))
    second = parts.add("pausing", Kind.ROUTER, signal.pause)
    eventually(lambda: listening(port), BEGUN_S, "it serves")
    assert process(part).name().startswith("baton scheduler")
    assert os.getpgid(process(part).pid) == process(part).pid  # Ctrl-C only reaches the parent
    part.proven = True
    process(part).kill()
    eventually(lambda: not listening(port), 10, "it is gone")

    def again():
        parts.reap()
        return listening(port)

    eventually(again, BEGUN_S, "it serves again")
    (why,) = [line for line in said if "CUDA is initialised" in line]  # once for all parts
    assert why.startswith("scheduler: ")
    assert "new program" in why
    pid = process(second).pid
    parts.stop(0.0)
    assert not psutil.pid_exists(pid)
    assert "died" in "".join(said)


def fail():
    print("about to fail", flush=True)
    raise RuntimeError("as it must")


def test_its_log_has_what_it_printed_and_why_it_ended(parts, tmp_path):
    part = parts.add("router", Kind.ROUTER, fail, ordered=True)
    child = part.child
    eventually(lambda: not child.alive, BEGUN_S, "it ended")
    assert child.how_it_ended() == "status 1"
    assert (tmp_path / "router.log").read_text().splitlines()[0] == "about to fail"
    assert "as it must" in child.last_error()


def test_all_that_a_deployments_parts_run_can_be_sent():
    """The arguments include settings with secrets, a worker's current role, and the watcher's pipe."""
    settings = load({"engine": {"model": "m"}, "router": {"api_key": "hidden"}})
    role = "prefill"
    work = children.Worker(settings, "prefill-0", lambda: role, Devices("0", {"CUDA_VISIBLE_DEVICES": "3"}))
    role = "decode"
    sent = pickle.loads(pickle.dumps(work))
    assert (sent.name, sent.role(), sent.where) == ("prefill-0", "decode", work.where)
    assert sent.settings.router.api_key.get_secret_value() == "hidden"
    role = "mixed"
    assert (work.role(), sent.role()) == ("mixed", "decode")
    router = pickle.loads(pickle.dumps(partial(children.router, settings, models_of(settings))))
    assert router.args[1][0].settings == settings


def tell(events, watched):
    events.send(watched.scheduler)


def test_the_watchers_pipe_reaches_it(parts):
    ours, theirs = Pipe(duplex=False)
    parts.add("watcher", Kind.WATCHER, partial(tell, theirs, Watched("here:1", "http://here")))
    assert ours.poll(BEGUN_S * PATIENCE)
    assert ours.recv() == "here:1"
