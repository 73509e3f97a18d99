"""Loads of prompts still being computed: early pulls, their queue, and their states."""

import threading
import time
from copy import deepcopy

import numpy as np
import pytest

from baton.handoff.groups import Part
from baton.handoff.load.loader import EARLY, State
from baton.handoff.load.pull import LoadJob
from baton.handoff.manifest import seal
from baton.handoff.save.saver import SaveJob
from harness.support import PATIENCE
from tests.handoff.caches import random_blocks, records, released
from tests.handoff.load.conftest import CACHE_BLOCKS
from tests.handoff.mock import Faults

LONG_S, DELAY_S = 3.5, 0.15  # a pull's timeout; a pull has four delays
WAITING = 14  # pulls, two at a time
FROM, INTO = random_blocks(CACHE_BLOCKS, 10, 1), random_blocks(CACHE_BLOCKS, 10, 3)


def begin(pair, name="r"):
    """Save the first four of ten blocks; return the job for the rest, and the manifest."""
    saved = pair.source.saver.save(SaveJob(name, 1, (Part(0, 0, FROM[:4]),), 10, last=False))
    manifest = pair.source.manifest(name, 310, 10, saved)
    return SaveJob(name, 1, (Part(0, 4, FROM[4:]),), 10), manifest


def reserve(pair, into=INTO, name="r"):
    pair.loader.reserve(LoadJob(name, 1, 310, (Part(0, 0, into),)))
    return name, 1


def early(pair, manifest, into=INTO, name="r"):
    pair.loader.begin(reserve(pair, into, name), manifest)


def fill_up(pair):
    """Begin as many early pulls as may run."""
    for number in range(EARLY):
        _, manifest = begin(pair, f"long-{number}")
        early(pair, manifest, (number + 1,) * 10, f"long-{number}")


@pytest.fixture
def half(pair, eventually):
    """An early load that has the first four blocks: the job for the rest, and the manifest."""
    rest, manifest = begin(pair)
    early(pair, manifest)
    eventually(lambda: pair.pulled() == 4)
    return rest, manifest


def is_right(pair):
    return np.array_equal(pair.landed(INTO), records(pair.source.cache, FROM))


def whole(manifest):
    made = deepcopy(manifest)
    made.saved_at_s = time.monotonic()
    return seal(made)


def state(pair, name="r"):
    load = pair.loader._loads.get((name, 1))
    return load.state if load is not None else None


def test_an_early_load_ends_with_its_requests_first_token(pair, half, eventually):
    rest, manifest = half
    pair.source.saver.save(rest)
    eventually(lambda: pair.source.staging.held() == (0, 0))
    eventually(lambda: state(pair) is State.HELD)
    assert pair.loader.take_finished() == []
    pair.loader.complete(("r", 1), whole(manifest))
    (done,) = pair.loader.take_finished()  # reported at once
    assert done.problem is None
    assert done.blocks == 10
    assert done.early_bytes == done.bytes == 10 * manifest.shards[0].record_bytes
    assert is_right(pair)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_manifest_may_come_before_the_blocks_or_after(pair, when, eventually):
    if when == "after":
        key = reserve(pair)
        assert state(pair) is State.RESERVED
    manifest = pair.source.save("r", 310, FROM)
    pair.loader.begin(("r", 1), manifest)
    if when == "before":  # ignored: the job will contain it
        assert state(pair) is None
        job = LoadJob("r", 1, 310, (Part(0, 0, INTO),), manifest=manifest)
        pair.loader.reserve(job)
        key = job.key
    eventually(lambda: state(pair) is State.HELD)
    pair.loader.complete(key, manifest)
    pair.succeeds()
    assert is_right(pair)


def test_a_load_begins_on_any_thread_and_once(pair, mock, eventually):
    rest, manifest = begin(pair)
    key = reserve(pair)
    threads = [threading.Thread(target=pair.loader.begin, args=(key, manifest)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: pair.pulled() == 4)
    pair.source.saver.save(rest)
    for _ in range(3):
        pair.loader.begin(key, whole(manifest))
        pair.loader.complete(key, whole(manifest))
    pair.succeeds()
    assert len(mock.pulls) == 1
    pair.loader.begin(key, manifest)
    assert pair.loader.take_finished() == []
    assert state(pair) is None


def test_the_times_of_an_early_load_count_from_its_prompts_end(pair, half):
    rest, manifest = half
    pair.loader.complete(("r", 1), whole(manifest))
    pair.source.saver.save(rest)
    done = pair.succeeds()
    assert done.early_bytes == 4 * manifest.shards[0].record_bytes
    assert done.costs.wait_ms == 0


@pytest.mark.parametrize("at", list(State))
def test_a_load_can_be_cancelled_in_each_state(pair, mock, at, eventually):
    """A load that is not being pulled is reported at once."""
    rest, manifest = begin(pair)
    if at is State.QUEUED:
        fill_up(pair)
        eventually(lambda: len(mock.pulls) == EARLY)
    key = reserve(pair)
    if at is not State.RESERVED:
        pair.loader.begin(key, manifest)
    if at is State.PULLING:
        eventually(lambda: pair.pulled() == 4)
    if at is State.HELD:
        pair.source.saver.save(rest)
    eventually(lambda: state(pair) is at)
    woken = threading.Event()
    pair.loader.on_finished = woken.set
    pair.loader.cancel([key, key])
    done = pair.finished() if at is State.PULLING else pair.loader.take_finished()[0]
    assert (done.problem and done.problem.name) == (None if at is State.HELD else "PullCancelled")
    assert woken.wait(PATIENCE)
    pair.loader.cancel([key])
    pair.loader.complete(key, whole(manifest))
    pair.loader.begin(key, manifest)
    assert pair.loader.take_finished() == []
    if at is not State.HELD:  # the save stays, because the prompt is not complete
        _, other = begin(pair, "behind it")
        released(pair.client, other)
        assert ("r", 1) in pair.source.staging._entries


def test_a_cancelled_load_of_a_complete_prompt_is_released(pair, mock, eventually):
    mock.faults.delay_s = 60
    manifests = {name: pair.source.save(name, 310, random_blocks(CACHE_BLOCKS, 10)) for name in "abr"}
    for name, manifest in manifests.items():  # two begin
        pair.loader.begin(reserve(pair, name=name), manifest)
    eventually(lambda: len(mock.pulls) == 2)
    assert state(pair) is State.QUEUED
    pair.loader.cancel([("r", 1)])
    (done,) = pair.loader.take_finished()
    assert done.problem is not None
    eventually(lambda: ("r", 1) not in pair.source.staging._entries)


def test_a_complete_prompt_gives_a_running_pull_a_deadline(pair, half):
    _, manifest = half
    told = threading.Event()
    pair.loader.on_finished = told.set
    pair.loader._pull_timeout_s = 0.05
    pair.loader.complete(("r", 1), whole(manifest))  # the rest never arrives
    assert told.wait(10 * PATIENCE)
    pair.fails("PullTimeout")


def test_a_queued_early_load_moves_to_the_ordinary_queue(pair, mock, eventually):
    """A complete prompt must not queue after early pulls, which wait for other prompts' steps."""
    fill_up(pair)
    eventually(lambda: len(mock.pulls) == EARLY)
    rest, manifest = begin(pair, "short")
    early(pair, manifest, name="short")
    pair.source.saver.save(rest)
    pair.loader.begin(("short", 1), whole(manifest))  # before its token is here
    eventually(lambda: state(pair, "short") is State.HELD)
    pair.loader.complete(("short", 1), whole(manifest))
    done = pair.finished()
    assert (done.request_id, done.problem) == ("short", None)
    assert done.early_bytes == 0


FAULT = {"fail": ({"fail_at": 5}, "TransportFailed"), "corrupt": ({"corrupt_block": 2}, "DigestMismatch")}


@pytest.mark.parametrize("fault", FAULT)
@pytest.mark.parametrize("again", [False, True])
def test_a_failed_early_pull_is_retried_when_the_prompt_is_complete(pair, mock, fault, again, eventually):
    faults, name = FAULT[fault]
    rest, manifest = begin(pair)
    mock.faults = Faults(**faults)
    early(pair, manifest)
    eventually(lambda: state(pair) is State.RESERVED)
    pair.source.saver.save(rest)
    assert pair.loader.take_finished() == []
    pair.loader.begin(("r", 1), manifest)  # the same manifest, once more
    assert state(pair) is State.RESERVED
    if not again:
        mock.faults = Faults()
    pair.loader.complete(("r", 1), whole(manifest))
    done = pair.finished()
    if again:
        assert done.problem.name == name
    else:
        assert done.problem is None
        assert (done.blocks, done.early_bytes) == (10, 0)
        assert is_right(pair)
    assert len(mock.pulls) == 2
    eventually(lambda: pair.source.staging.held() == (0, 0))


def test_a_load_that_ends_during_its_cancellation_is_reported_once(pair, half, monkeypatch, eventually):
    rest, _ = half
    cancellation = pair.loader._loads["r", 1].progress.cancellation

    def ends_first():
        pair.source.saver.save(rest)
        eventually(lambda: state(pair) is None)

    monkeypatch.setattr(cancellation, "set", ends_first)
    pair.loader.cancel([("r", 1)])
    pair.succeeds()


def test_time_in_the_queue_does_not_count_towards_the_deadline(pair, mock):
    pair.loader._pull_timeout_s, mock.faults.delay_s = LONG_S, DELAY_S
    fill_up(pair)
    for number in range(WAITING):
        manifest = pair.source.save(f"r{number}", 310, random_blocks(CACHE_BLOCKS, 10))
        pair.load(manifest, Part(0, 0, random_blocks(CACHE_BLOCKS, 10)), request_id=f"r{number}")
    rest, manifest = begin(pair, "late")
    early(pair, manifest, name="late")
    pair.source.saver.save(rest)
    pair.loader.complete(("late", 1), whole(manifest))
    done = {}
    deadline = time.monotonic() + 20 * PATIENCE
    while "late" not in done and time.monotonic() < deadline:
        done |= {one.request_id: one for one in pair.loader.take_finished()}
        time.sleep(0.01)
    assert done["late"].problem is None
    assert done["late"].costs.wait_ms > 1e3 * LONG_S
