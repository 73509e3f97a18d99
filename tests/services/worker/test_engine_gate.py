"""A request that is tried alone: the engine has no other meanwhile, and no request is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from baton.handoff.params import asks_for_load
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, Failed, Start
from baton.services.config import SchedulerSettings
from baton.services.engine.host import EngineStep
from baton.services.roles import MIXED
from baton.services.worker import engine_gate
from baton.services.worker.dispatcher import Dispatcher
from baton.services.worker.metrics import WorkerMetrics
from harness.fake_worker import until
from tests.services.worker.test_dispatcher import (
    GRAMMAR,
    INFO,
    Compilers,
    Host,
    complete,
    incoming,
    start,
    with_kv,
)


class Engine(Host):
    """Records its requests; fails where a step could have another one beside one that had to be alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.waits: set[str] = set()  # those without a token: no step has them
        self.alone: set[str] = set()

    def submit(self, request: Any) -> None:
        super().submit(request)
        self.inside.append(request.request_id)
        if asks_for_load(params := request.kv_transfer_params) and not params["manifest"]:
            self.waits.add(request.request_id)
        self.check()

    def check(self) -> None:
        running = set(self.inside) - self.waits
        assert len(running) < 2 or not self.alone & running, running

    def abort(self, internal_ids: list[str]) -> None:
        super().abort(internal_ids)
        self.inside = [name for name in self.inside if name not in internal_ids]

    def begin_load(self, internal_id: str, epoch: int, manifest: Any) -> None:
        super().begin_load(internal_id, epoch, manifest)
        assert internal_id in self.submitted

    def resume(self, internal_id: str, epoch: int, manifest: Any, give_tokens: Any) -> None:
        super().resume(internal_id, epoch, manifest, give_tokens)
        assert internal_id in self.begun
        self.waits.remove(internal_id)
        self.check()


class Worker:
    """A dispatcher with one router's stream, and its engine."""

    def __init__(self, max_requests: int = 8) -> None:
        self.engine = Engine()
        self.dispatcher = Dispatcher(
            MIXED,
            SchedulerSettings(max_queue_factor=1.0),
            cast(Any, self.engine),
            WorkerMetrics(),
            None,
            grammars=cast(Any, Compilers()),
        )
        self.dispatcher.open(replace(INFO, max_num_seqs=max_requests))
        self.session = self.dispatcher.connect("router")

    def start(
        self, name: str, alone: int = 0, *, session: Any = None, more: bool = False, **given: Any
    ) -> None:
        message = start(name, **given)
        message.alone_tokens, message.more_alone = alone, more
        if alone:
            self.engine.alone.add(f"{name}#{message.epoch}")
        self.dispatcher.start(session or self.session, message)

    def fail(self, name: str) -> None:
        """Let a step fail with one request."""
        self.engine.inside.remove(name)
        self.dispatcher.on_step(EngineStep(failed=[name], problem="shape mismatch"))

    def end(self, name: str) -> None:
        """As its client would."""
        self.dispatcher.abort([name.partition("#")[0]])

    def failed(self) -> list[Failed]:
        found = []
        while not self.session._queue.empty():
            found += list(self.session._queue.get_nowait().failed)
        return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_gate, "GRACE_S", 0.1)
    monkeypatch.setattr(engine_gate, "TURN_S", 0.4)
    monkeypatch.setattr(engine_gate, "LINGER_S", 0.1)
    monkeypatch.setattr(engine_gate, "LEAST_REST_S", 0.05)


@pytest.fixture
async def worker() -> Worker:
    return Worker()


async def inside(worker: Worker, *names: str) -> None:
    await until(lambda: worker.engine.inside == list(names), f"{names} are in the engine")


async def test_it_waits_until_the_engine_is_empty(worker: Worker) -> None:
    worker.start("a")
    worker.start("s", 4)
    worker.start("b")
    assert worker.engine.inside == ["a#1"]
    worker.end("a#1")
    await inside(worker, "s#1")
    worker.end("s#1")
    await inside(worker, "b#1")
    assert worker.failed() == [], "the one that ended in time was not moved"


async def test_who_does_not_end_in_time_is_moved_on(worker: Worker) -> None:
    worker.start("a")
    worker.start("l", phase=PHASE_PREFILL)
    worker.start("s", 4)
    await inside(worker, "s#1")
    moved = worker.failed()
    assert {(one.request_id, one.code) for one in moved} == {
        ("a", Failed.CODE_DRAINING),
        ("l", Failed.CODE_DRAINING),
    }
    worker.start("a", epoch=2)  # back again, as there is no other worker
    worker.end("s#1")
    await inside(worker, "a#2")


async def test_two_go_one_after_the_other_and_before_what_is_held(worker: Worker) -> None:
    other = worker.dispatcher.connect("another router")
    worker.start("s", 4)
    worker.start("a")
    worker.start("t", 4, session=other)
    assert worker.engine.inside == ["s#1"]
    worker.end("s#1")
    await inside(worker, "t#1")
    worker.end("t#1")
    await inside(worker, "a#1")


async def test_what_is_held_waits_for_the_next_of_a_router_that_has_more(worker: Worker) -> None:
    worker.start("s", 4, more=True)
    worker.start("a")
    worker.end("s#1")
    await asyncio.sleep(0)
    assert worker.engine.inside == []
    worker.start("t", 4)
    await inside(worker, "t#1")
    worker.end("t#1")
    await inside(worker, "a#1")


async def test_a_router_that_sends_no_more_holds_nobody_for_long(worker: Worker) -> None:
    worker.start("s", 4, more=True)
    worker.start("a")
    worker.end("s#1")
    await inside(worker, "a#1")


async def test_a_long_one_is_sent_back_when_its_turn_is_over(worker: Worker) -> None:
    worker.start("s", 900)
    worker.start("a")
    await inside(worker, "a#1")
    [failed] = worker.failed()
    assert (failed.request_id, failed.code) == ("s", Failed.CODE_DRAINING)
    worker.start("s", 900, epoch=2)
    await asyncio.sleep(0)
    assert worker.engine.inside == ["a#1"], "those that were held have as much time"
    await inside(worker, "s#2")


async def test_a_long_one_stays_while_nobody_waits(worker: Worker) -> None:
    worker.start("s", 900)
    await asyncio.sleep(0.6)
    assert worker.engine.inside == ["s#1"]
    worker.start("a")
    await inside(worker, "a#1")


async def test_the_step_that_fails_with_it_lets_the_others_in(worker: Worker) -> None:
    worker.start("s", 4)
    worker.start("a")
    worker.fail("s#1")
    await inside(worker, "a#1")
    [failed] = worker.failed()
    assert (failed.code, failed.engine_goes_on) == (Failed.CODE_ENGINE, True)
    assert "shape mismatch" in failed.message


async def test_those_that_wait_can_be_aborted(worker: Worker) -> None:
    worker.start("a")
    for name, alone in (("s", 4), ("t", 4), ("b", 0), ("c", 0)):
        worker.start(name, alone)
    worker.dispatcher.abort(["s", "b"])
    await inside(worker, "t#1")
    worker.end("t#1")
    await inside(worker, "c#1")
    assert {"s#1", "b#1"}.isdisjoint(worker.engine.submitted)
    assert worker.dispatcher.requests == 1


async def test_those_of_a_router_that_is_gone_leave(worker: Worker) -> None:
    other = worker.dispatcher.connect("another router")
    worker.start("s", 4)
    worker.start("t", 4, session=other)
    worker.start("b", session=other)
    worker.start("c")
    worker.dispatcher.disconnect(other)
    worker.end("s#1")
    await inside(worker, "c#1")
    assert worker.dispatcher.requests == 1


async def test_a_drain_ends_when_all_that_wait_have_run(worker: Worker) -> None:
    worker.start("s", 4)
    worker.start("a")
    worker.dispatcher.drain()
    worker.end("s#1")
    await inside(worker, "a#1")
    worker.end("a#1")
    assert worker.dispatcher.idle


async def test_a_drain_that_takes_too_long_hands_all_back(worker: Worker) -> None:
    worker.start("s", 4)
    worker.start("t", 4)
    worker.start("a")
    assert worker.dispatcher.abort_all() == 3
    await asyncio.sleep(0)
    assert worker.engine.inside == []
    assert {one.code for one in worker.failed()} == {Failed.CODE_DRAINING}


async def test_an_engine_that_breaks_under_it_is_not_the_fault_of_those_that_wait(worker: Worker) -> None:
    worker.start("s", 4)
    worker.start("a")
    worker.start("t", 4)
    worker.dispatcher.on_failure(RuntimeError("CUDA error"), {"s#1"})
    codes = {one.request_id: one.code for one in worker.failed()}
    assert codes == {"s": Failed.CODE_ENGINE, "a": Failed.CODE_DRAINING, "t": Failed.CODE_DRAINING}


async def test_who_had_not_run_as_the_engine_broke_is_no_suspect(worker: Worker) -> None:
    for name in "abc":
        worker.start(name)
    worker.dispatcher.on_failure(RuntimeError("CUDA error"), {"a#1"})
    codes = {one.request_id: one.code for one in worker.failed()}
    assert codes == {"a": Failed.CODE_ENGINE, "b": Failed.CODE_DRAINING, "c": Failed.CODE_DRAINING}


async def test_held_ones_count_as_requests() -> None:
    worker = Worker(max_requests=2)
    worker.start("s", 4)
    for name in "abc":
        worker.start(name)
    [failed] = worker.failed()
    assert (failed.request_id, failed.code) == ("c", Failed.CODE_FULL)
    worker.start("t", 4)
    worker.start("u", 4)
    [failed] = worker.failed()
    assert (failed.request_id, failed.code) == ("u", Failed.CODE_FULL)  # what is tried alone, by itself


async def test_a_decode_that_is_held_keeps_its_order(worker: Worker) -> None:
    worker.start("s", 4)
    worker.dispatcher.start(worker.session, with_kv(start("a")))
    comes = incoming(worker.dispatcher, "a#1")
    comes.on_begun(complete().manifest)
    comes.on_complete(complete(5))
    assert (worker.engine.begun, worker.engine.resumed) == ([], [])
    worker.end("s#1")
    await until(lambda: worker.engine.resumed == ["a#1"], "it goes on")


async def test_what_is_not_in_the_engine_yet_is_not_moved_on(worker: Worker) -> None:
    """It waits for its token, and would begin only after the trial."""
    worker.dispatcher.start(worker.session, with_kv(start("a", **GRAMMAR)))
    comes = incoming(worker.dispatcher, "a#1")
    worker.start("s", 4)
    await inside(worker, "s#1")
    comes.on_complete(complete(ord("a")))
    worker.end("s#1")
    await inside(worker, "a#1")
    assert worker.failed() == []


async def test_what_waits_for_its_source_stays_through_a_trial(worker: Worker) -> None:
    """No step can have it before its token is given, and its prompt may be half computed elsewhere."""
    worker.dispatcher.start(worker.session, with_kv(start("a")))
    worker.dispatcher.start(worker.session, with_kv(start("b")))
    worker.start("s", 4)
    await inside(worker, "a#1", "b#1", "s#1")
    for name in ("a#1", "b#1"):
        incoming(worker.dispatcher, name).on_begun(complete().manifest)
    assert worker.engine.begun == ["a#1", "b#1"], "their pulls go on"
    for name in ("b#1", "a#1"):
        incoming(worker.dispatcher, name).on_complete(complete(5))
    assert worker.engine.resumed == []
    worker.end("s#1")
    await until(lambda: bool(worker.engine.resumed), "they go on")
    assert worker.engine.resumed == ["b#1", "a#1"]
    assert worker.failed() == []


async def test_what_has_its_token_as_a_trial_is_due_is_moved_on(worker: Worker) -> None:
    worker.dispatcher.start(worker.session, with_kv(start("a")))
    incoming(worker.dispatcher, "a#1").on_begun(complete().manifest)
    incoming(worker.dispatcher, "a#1").on_complete(complete(5))
    worker.start("s", 4)
    assert worker.engine.submitted == ["a#1"]
    await inside(worker, "s#1")
    [failed] = worker.failed()
    assert (failed.request_id, failed.code) == ("a", Failed.CODE_DRAINING)


async def test_a_token_that_comes_while_others_get_time_to_end_waits_as_well(worker: Worker) -> None:
    worker.start("b")
    worker.dispatcher.start(worker.session, with_kv(start("a")))
    incoming(worker.dispatcher, "a#1").on_begun(complete().manifest)
    worker.start("s", 4)
    incoming(worker.dispatcher, "a#1").on_complete(complete(5))
    assert worker.engine.resumed == []
    worker.end("b#1")
    await inside(worker, "a#1", "s#1")
    await until(lambda: worker.engine.resumed == ["a#1"], "the trial's turn ends for it")
    assert [one.request_id for one in worker.failed()] == ["s"]


async def test_what_is_aborted_while_its_token_waits_gets_none(worker: Worker) -> None:
    worker.dispatcher.start(worker.session, with_kv(start("a")))
    worker.start("s", 4)
    await inside(worker, "a#1", "s#1")
    incoming(worker.dispatcher, "a#1").on_begun(complete().manifest)
    incoming(worker.dispatcher, "a#1").on_complete(complete(5))
    worker.dispatcher.abort(["a"])
    worker.end("s#1")
    worker.start("b")
    await inside(worker, "b#1")
    assert worker.engine.resumed == []


async def test_an_engine_that_breaks_under_a_trial_is_not_the_fault_of_what_waits_for_its_token(
    worker: Worker,
) -> None:
    worker.dispatcher.start(worker.session, with_kv(start("a")))
    worker.start("s", 4)
    await inside(worker, "a#1", "s#1")
    incoming(worker.dispatcher, "a#1").on_begun(complete().manifest)
    incoming(worker.dispatcher, "a#1").on_complete(complete(5))
    worker.dispatcher.on_failure(RuntimeError("CUDA error"))
    codes = {one.request_id: one.code for one in worker.failed()}
    assert codes == {"a": Failed.CODE_DRAINING, "s": Failed.CODE_ENGINE}


async def test_one_with_a_grammar_is_tried_alone(worker: Worker) -> None:
    worker.start("a")
    worker.start("s", 4, **GRAMMAR)
    worker.end("a#1")
    await inside(worker, "s#1")


@pytest.fixture(params=["a prefill", "with a source"])
def wrong(request: pytest.FixtureRequest) -> Start:
    message = start("s", phase=PHASE_PREFILL if request.param == "a prefill" else PHASE_DECODE)
    if request.param != "a prefill":
        with_kv(message)
    message.alone_tokens = 4
    return message


async def test_only_what_computes_its_own_prompt_is_tried_alone(worker: Worker, wrong: Start) -> None:
    worker.dispatcher.start(worker.session, wrong)
    [failed] = worker.failed()
    assert failed.code == Failed.CODE_INVALID
    worker.start("a")
    assert worker.engine.inside == ["a#1"]
