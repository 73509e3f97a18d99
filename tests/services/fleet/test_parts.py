"""Parts that die are restarted after growing pauses, and given up when they keep dying.

Parts are real processes that do little; `said` has the lines printed about them.
"""

import errno
import os
import shutil
import signal
import sys
import time
from multiprocessing.connection import wait

import pytest

from baton.services.errors import StartError
from baton.services.fleet.parts import Kind, Parts, Patience
from baton.services.fleet.watch import Seen
from baton.services.leave import ENGINE_FAILED
from harness.support import eventually, freeze

QUICK = Patience(restarts=2, window_s=60.0, backoff_s=0.05, growth=2.0)


class Fleet:
    """Parts of a deployment, and the lines printed about them."""

    def __init__(self, folder, patience):
        self.said = []
        self.parts = Parts(folder, lambda name, text: self.said.append(f"{name}: {text}"), patience)

    def add(self, name, kind, run=signal.pause):
        part = self.parts.add(name, kind, run)
        self.see(part)
        return part

    def see(self, part):
        self.parts.note(Seen(part.known_as, "here", time.monotonic()))

    def until(self, so, what):
        """Reap like a supervisor until `so()` is true."""

        def look():
            wait(self.parts.sentinels, timeout=min(self.parts.next_start_s or 0.05, 0.05))
            self.parts.reap()
            return so()

        eventually(look, 10, what, 0.0)

    def kill(self, part, times=1):
        for _ in range(times):
            self.end(part, lambda pid: os.kill(pid, signal.SIGKILL))

    def end(self, part, act):
        """Call `act` on a part's process, and wait until it runs again or is given up."""
        before = part.child
        act(before.process.pid)
        self.until(
            lambda: part.given_up or (part.runs and part.child is not before), f"{part.name} runs again"
        )


def wail():
    os.write(1, b"the model cannot be fetched: no such host\n")  # past pytest, which captures sys.stdout
    signal.pause()


def test_the_last_words_of_a_part_that_is_waited_for_are_known(fleet):
    """The last line of a part may be about a model whose download hangs."""
    part = fleet.parts.add("prefill-0", Kind.WORKER, wail)
    eventually(lambda: "no such host" in fleet.parts.last_words, 10, "it has said so")
    assert f"; prefill-0 said last ({part.child.log}): the model cannot" in fleet.parts.last_words
    fleet.see(part)
    assert fleet.parts.last_words == ""


@pytest.fixture
def fleet(tmp_path):
    one = Fleet(tmp_path, QUICK)
    yield one
    one.parts.stop(0.0)


def pair(fleet):
    fleet.add("watcher", Kind.WATCHER)
    fleet.add("scheduler", Kind.SCHEDULER)
    workers = fleet.add("prefill-0", Kind.WORKER), fleet.add("decode-0", Kind.WORKER)
    return *workers, fleet.add("router", Kind.ROUTER)


def test_pauses_before_restarts_grow(fleet):
    prefill, decode = fleet.add("prefill-0", Kind.WORKER), fleet.add("decode-0", Kind.WORKER)
    began = time.monotonic()
    fleet.kill(decode, 2)
    assert time.monotonic() - began >= QUICK.before_restart_s(2) == 0.05
    assert fleet.said[-2:] == [
        "decode-0: died (signal SIGKILL); restarting, 1 of 2 within 1 min",
        "decode-0: died (signal SIGKILL); restarting in 0.05 s, 2 of 2 within 1 min",
    ]
    assert fleet.parts.waiting_for == ["decode-0"]
    fleet.see(decode)
    assert fleet.said[-1] == "decode-0: ready: here"
    assert not fleet.parts.waiting_for
    assert not prefill.budget.deaths


def printed(part):
    return part.child.log.read_text()[part.child.log_from :]


def wait_for(number, begun):
    """Call `begun`, and wait for a signal. Any thread may take it: a fork can leave some of gRPC's."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(number, lambda *_: None)
    begun()
    os.read(reading, 1)


def engine():
    """Fail on SIGUSR1, even if it comes before the wait for it."""
    words = b"baton: error: the engine failed: ValueError: shape mismatch\n"
    wait_for(signal.SIGUSR1, lambda: os.write(1, words))
    os._exit(ENGINE_FAILED)


def test_an_engine_that_fails_uses_up_no_restart(fleet):
    """A request may cause this repeatedly, and must not end the deployment."""
    fleet.add("scheduler", Kind.SCHEDULER)
    worker = fleet.add("mixed-0", Kind.WORKER, engine)
    fleet.add("router", Kind.ROUTER)
    for _ in range(QUICK.restarts + 2):
        eventually(lambda: "shape" in printed(worker), 10, "it can be ended")
        fleet.end(worker, lambda pid: os.kill(pid, signal.SIGUSR1))
        fleet.see(worker)
    assert not worker.given_up
    assert not worker.budget.deaths
    said = [line for line in fleet.said if "engine failed" in line]
    assert said[0] == "mixed-0: its engine failed: the engine failed: ValueError: shape mismatch; restarting"
    assert said[1].endswith("; restarting in 0.05 s")
    assert said[2].endswith("; restarting in 0.1 s")
    fleet.kill(worker, 2)
    assert not worker.given_up, "all of its restarts were left"


def test_a_worker_whose_engine_never_served_ends_the_start(fleet):
    worker = fleet.parts.add("mixed-0", Kind.WORKER, lambda: os._exit(ENGINE_FAILED))
    with pytest.raises(StartError, match="mixed-0 could not start"):
        fleet.end(worker, lambda _: None)


def test_a_member_that_ends_with_another_machines_while_it_first_loads_is_restarted(fleet):
    worker = fleet.parts.add("mixed-0.r0", Kind.WORKER, engine, gang="mixed-0")
    eventually(lambda: "shape" in printed(worker), 10, "it can be ended")
    fleet.end(worker, lambda pid: os.kill(pid, signal.SIGUSR1))
    assert worker.runs
    assert "mixed-0.r0: its engine failed" in fleet.said[-1]


@pytest.fixture
def gang(fleet):
    fleet.add("scheduler", Kind.SCHEDULER)
    fleet.add("prefill-0", Kind.WORKER)
    first, second = (
        fleet.parts.add(f"decode-0.r{rank}", Kind.WORKER, engine, gang="decode-0") for rank in (0, 1)
    )
    for part in (first, second):
        fleet.see(part)
        eventually(lambda part=part: "shape" in printed(part), 10, "it can be ended")
    fleet.add("router", Kind.ROUTER)
    return first, second


def lose(fleet, one, other):
    """Kill a worker of a gang. The other one ends because of that."""
    fleet.kill(one)
    if not other.given_up:
        fleet.end(other, lambda pid: os.kill(pid, signal.SIGUSR1))
        for part in (one, other):
            eventually(lambda part=part: "shape" in printed(part), 10, "it can be ended")
            fleet.see(part)


def test_the_end_of_a_gang_counts_once(fleet, gang):
    first, second = gang
    lose(fleet, second, first)
    lose(fleet, first, second)
    assert len(first.budget.deaths) == 2
    assert not first.budget.engine_failures
    assert "decode-0.r0: ended with its gang; restarting" in fleet.said
    assert fleet.parts.waiting_for == []


def test_a_gang_is_given_up_as_a_whole(fleet, gang):
    first, second = gang
    for _ in range(QUICK.restarts):
        lose(fleet, second, first)
    fleet.kill(second)
    assert first.given_up
    assert first.state == "given up"
    first.child.process.join(10)
    assert not first.child.alive, "it would wait for the other one"
    fleet.parts.reap()
    assert fleet.said[-1].startswith(
        "decode-0.r1: died 3 times within 1 min (signal SIGKILL): given up with the rest of gang decode-0, "
        "the others keep serving: "
    )


def test_a_worker_that_does_not_end_with_its_gang_is_killed(fleet, gang, monkeypatch):
    """The next life of the gang would wait for it."""
    monkeypatch.setattr("baton.services.fleet.parts.GANG_END_S", 0.1)
    first, second = gang
    before = first.child
    freeze(before.process.pid)
    fleet.end(second, lambda pid: os.kill(pid, signal.SIGUSR1))
    fleet.until(lambda: first.runs and first.child is not before, "the first one is restarted")
    assert "decode-0.r0: did not end with its gang: killed" in fleet.said
    assert "decode-0.r0: ended with its gang; restarting" in fleet.said
    assert not first.budget.deaths


def test_without_a_router_nothing_can_serve(fleet):
    *_, router = pair(fleet)
    fleet.kill(router, 2)
    with pytest.raises(StartError, match=r"router died 3 times .* nothing can serve without it"):
        fleet.kill(router)


def test_all_schedulers_but_one_can_be_given_up(fleet):
    pair(fleet)
    one, other = fleet.parts.members[1], fleet.add("scheduler-1", Kind.SCHEDULER)
    fleet.kill(one, 3)
    assert "given up, the others keep serving" in fleet.said[-1]
    fleet.kill(other, 2)
    with pytest.raises(StartError, match="nothing can serve without it"):
        fleet.kill(other)


def test_the_watcher_is_given_up_unless_a_start_needs_it(fleet):
    pair(fleet)
    watcher, other = fleet.parts.members[0], fleet.add("watcher-1", Kind.WATCHER)
    fleet.kill(watcher, 3)
    assert fleet.said[-3].startswith("watcher: died (signal SIGKILL); restarting")
    assert "readiness is no longer reported" in fleet.said[-1]
    fleet.parts.add("mixed-0", Kind.WORKER, signal.pause)
    fleet.kill(other, 2)
    with pytest.raises(StartError, match="nothing can tell when the others are ready"):
        fleet.kill(other)


def test_an_exit_after_a_drain_is_not_a_death(fleet):
    reading, writing = os.pipe()
    part = fleet.add("mixed-0", Kind.WORKER, lambda: print(os.read(reading, 1)))
    for _ in range(QUICK.restarts + 1):
        fleet.end(part, lambda _: os.write(writing, b"x"))
        fleet.see(part)
    assert not part.budget.deaths
    assert fleet.said[-2:] == ["mixed-0: exited after a drain; restarted", "mixed-0: ready: here"]
    os.close(reading)
    os.close(writing)


def test_a_drain_after_a_death_is_no_death_where_readiness_is_unknown(fleet):
    fleet.parts.whole = False
    worker = fleet.parts.add("decode-0", Kind.WORKER, drained)
    fleet.kill(worker)
    eventually(lambda: "drains" in printed(worker), 10, "it can be drained")
    fleet.end(worker, lambda pid: os.kill(pid, signal.SIGTERM))
    assert fleet.said[-1] == "decode-0: exited after a drain; restarted"
    assert len(worker.budget.deaths) == 1


def drained():
    wait_for(signal.SIGTERM, lambda: os.write(1, b"drains\n"))
    os._exit(0)


def test_deaths_long_ago_do_not_count(tmp_path):
    fleet = Fleet(tmp_path, Patience(restarts=1, window_s=0.2, backoff_s=0.05))
    try:
        decode = fleet.add("decode-0", Kind.WORKER)
        for _ in range(3):
            fleet.kill(decode)
            died = decode.budget.deaths[-1]
            eventually(lambda died=died: time.monotonic() > died + 0.2, 5, "it ran well for the window")
        assert not decode.given_up
        assert fleet.said[-1].endswith("restarting, 1 of 1 within 0.00333333 min")
    finally:
        fleet.parts.stop(0.0)


def test_readiness_of_a_predecessor_does_not_count(fleet):
    """A dead worker stays registered for a lease, and the watcher's message may be late."""
    decode, router = fleet.add("decode-0", Kind.WORKER), fleet.add("router", Kind.ROUTER)
    before = [Seen(part.known_as, "here", time.monotonic()) for part in (decode, router)]
    fleet.kill(decode)
    fleet.kill(router)
    for seen in before:
        fleet.parts.note(seen)
    assert set(fleet.parts.waiting_for) == {"decode-0", "router"}


def test_a_dead_worker_is_not_ready_while_it_waits_for_its_restart(fleet):
    """It stays registered for a lease, and the watcher sees it there."""
    decode = fleet.add("decode-0", Kind.WORKER)
    fleet.kill(decode)  # the first restart is immediate
    fleet.see(decode)
    os.kill(decode.child.process.pid, signal.SIGKILL)
    eventually(lambda: fleet.parts.reap() or decode.restart_at is not None, 10, "it pauses", 0.0)
    fleet.see(decode)
    assert fleet.parts.waiting_for == ["decode-0"]


def fail():
    os.write(2, b"baton: error: no room\n")  # past pytest, which captures sys.stderr
    sys.exit(1)


def end_by_a_signal():
    os.write(2, b"WARNING: something else\n")
    os.kill(os.getpid(), signal.SIGXCPU)  # pytest's fault handler adds lines to what a fault prints


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (fail, "no room"),
        (end_by_a_signal, "it ended with signal SIGXCPU; it said last: WARNING: something else"),
    ],
)
def test_a_part_that_cannot_start_says_why(fleet, run, said):
    """It quotes its own error line, not that of a predecessor in the same log."""
    (fleet.parts.log_dir / "mixed-0.log").write_text("baton: error: long ago\n")
    fleet.parts.add("mixed-0", Kind.WORKER, run)
    with pytest.raises(StartError, match=f"mixed-0 could not start: {said}"):
        eventually(fleet.parts.reap, 10, "its end is seen")


def no_room(monkeypatch, times):
    fork, left = os.fork, [times]

    def failing():
        if left[0]:
            left[0] -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", failing)


def test_a_restart_without_room_for_a_process_is_tried_again(fleet, monkeypatch):
    decode = fleet.add("decode-0", Kind.WORKER)
    no_room(monkeypatch, 3)
    fleet.kill(decode)
    why = "this machine cannot start another process: Resource temporarily unavailable"
    assert [line for line in fleet.said if "not started" in line] == [
        f"decode-0: not started: {why}; retrying in {pause} s" for pause in ("0.05", "0.1", "0.2")
    ]
    fleet.see(decode)
    assert not fleet.parts.waiting_for
    assert len(decode.budget.deaths) == 1  # not counted for the failed starts


def test_a_first_start_without_room_for_a_process_is_reported(fleet, monkeypatch):
    """A user is waiting for it."""
    no_room(monkeypatch, 99)
    part = fleet.parts.add("mixed-0", Kind.WORKER, signal.pause)
    with pytest.raises(StartError, match="mixed-0 could not start: this machine cannot start another"):
        fleet.until(lambda: False, "it is given up")
    assert part.child is None


@pytest.mark.parametrize("how", ["removed", "a file"])
def test_without_a_folder_for_logs_a_part_is_restarted(fleet, how):
    """A cleaner of /tmp may remove it."""
    decode = fleet.add("decode-0", Kind.WORKER)
    folder = fleet.parts.log_dir
    shutil.rmtree(folder)
    if how == "a file":  # the folder cannot be recreated
        folder.touch()
    fleet.kill(decode)
    fleet.see(decode)
    assert not fleet.parts.waiting_for
    if how == "a file":
        assert any("decode-0: runs without a log: Not a directory" in line for line in fleet.said)
        folder.unlink()
    else:
        assert (folder / "decode-0.log").exists()


def test_parts_get_the_signal_before_the_end_is_reported(fleet):
    router = fleet.add("router", Kind.ROUTER)
    told = []

    def report():
        router.child.process.join(10)
        told.append(router.child.alive)

    fleet.parts.stop(0.0, told=report)
    assert told == [False]
