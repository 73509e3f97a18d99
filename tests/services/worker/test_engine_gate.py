"""A suspect runs alone in the engine, and no other request is lost."""

import asyncio

import pytest

from baton.handoff.params import LoadWish, wish_of
from baton.protos.worker_pb2 import PHASE_PREFILL, Failed
from baton.services.engine.step import EngineStep
from baton.services.worker import engine_gate
from harness.fake_worker import until
from tests.services.worker import idle_worker
from tests.services.worker.idle_worker import GRAMMAR, complete, start, with_kv


class Engine(idle_worker.Engine):
    """Fails if a step could include another request with a suspect."""

    def __init__(self):
        super().__init__()
        self.inside = []
        self.waits = set()  # requests without a first token, which no step includes
        self.alone = set()

    def submit(self, request):
        super().submit(request)
        self.inside.append(request.request_id)
        wish = wish_of(request.kv_transfer_params)
        if isinstance(wish, LoadWish) and wish.manifest is None:
            self.waits.add(request.request_id)
        self.check()

    def check(self):
        running = set(self.inside) - self.waits
        assert len(running) < 2 or not self.alone & running, running

    def abort(self, internal_ids):
        super().abort(internal_ids)
        self.inside = [name for name in self.inside if name not in internal_ids]

    def begin_load(self, internal_id, epoch, manifest):
        super().begin_load(internal_id, epoch, manifest)
        assert internal_id in self.submitted

    def resume(self, internal_id, epoch, manifest, give_tokens):
        super().resume(internal_id, epoch, manifest, give_tokens)
        assert internal_id in self.begun
        self.waits.remove(internal_id)
        self.check()


class Worker(idle_worker.Worker):
    def __init__(self, max_requests=8):
        super().__init__(Engine(), max_num_seqs=max_requests)

    def start(self, message, session=None, *, alone=0, more=False, **given):
        message = start(message, **given) if isinstance(message, str) else message
        if alone:
            message.alone_tokens, message.more_alone = alone, more
            self.engine.alone.add(f"{message.request_id}#{message.epoch}")
        super().start(message, session)

    def fail(self, name):
        """Let a step fail with one request."""
        self.engine.inside.remove(name)
        self.dispatcher.on_step(EngineStep(failed=[name], problem="shape mismatch"))

    def first_token(self, name):
        """Let the source of a decode begin and complete."""
        self.incoming(name).on_begun(complete().manifest)
        self.incoming(name).on_complete(complete(5))

    def end(self, name):
        self.dispatcher.abort([name.partition("#")[0]])


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name, seconds in (("GRACE_S", 0.1), ("TURN_S", 0.4), ("LINGER_S", 0.1), ("LEAST_REST_S", 0.05)):
        monkeypatch.setattr(engine_gate, name, seconds)


@pytest.fixture
async def worker():
    return Worker()


async def inside(worker, *names):
    await until(lambda: worker.engine.inside == list(names), f"{names} are in the engine")


async def hold_a_first_token(worker):
    worker.start(with_kv(start("a")))
    worker.start("s", alone=4)
    await inside(worker, "a#1", "s#1")
    worker.first_token("a")


async def test_it_waits_until_the_engine_is_empty(worker):
    worker.start("a")
    worker.start("s", alone=4)
    worker.start("b")
    assert worker.engine.inside == ["a#1"]
    worker.end("a#1")
    await inside(worker, "s#1")
    worker.end("s#1")
    await inside(worker, "b#1")
    assert worker.failed() == [], "it ended in time and was not moved"


async def test_requests_that_do_not_end_in_time_are_moved(worker):
    worker.start("a")
    worker.start("l", phase=PHASE_PREFILL)
    worker.start("s", alone=4)
    await inside(worker, "s#1")
    assert worker.codes() == dict.fromkeys("al", Failed.CODE_DRAINING)
    worker.start("a", epoch=2)  # it comes back, because there is no other worker
    worker.end("s#1")
    await inside(worker, "a#2")


async def test_suspects_run_one_after_another_before_held_requests(worker):
    other = worker.dispatcher.connect("another router")
    worker.start("s", alone=4)
    worker.start("a")
    worker.start("t", alone=4, session=other)
    assert worker.engine.inside == ["s#1"]
    worker.end("s#1")
    await inside(worker, "t#1")
    worker.end("t#1")
    await inside(worker, "a#1")


async def test_held_requests_wait_for_the_next_suspect_of_the_router(worker):
    worker.start("s", alone=4, more=True)
    worker.start("a")
    worker.end("s#1")
    await asyncio.sleep(0)
    assert worker.engine.inside == []
    worker.start("t", alone=4)
    await inside(worker, "t#1")
    worker.end("t#1")
    await inside(worker, "a#1")


async def test_held_requests_do_not_wait_long_for_an_announced_suspect(worker):
    worker.start("s", alone=4, more=True)
    worker.start("a")
    worker.end("s#1")
    await inside(worker, "a#1")


async def test_a_long_suspect_is_sent_back_when_its_time_is_up(worker):
    worker.start("s", alone=900)
    worker.start("a")
    await inside(worker, "a#1")
    assert worker.codes() == {"s": Failed.CODE_DRAINING}
    worker.start("s", alone=900, epoch=2)
    await asyncio.sleep(0)
    assert worker.engine.inside == ["a#1"], "held requests run for as long as they were held"
    await inside(worker, "s#2")


async def test_a_long_suspect_stays_while_no_request_waits(worker):
    worker.start("s", alone=900)
    await asyncio.sleep(0.6)
    assert worker.engine.inside == ["s#1"]
    worker.start("a")
    await inside(worker, "a#1")


async def test_a_suspect_that_fails_lets_held_requests_in(worker):
    worker.start("s", alone=4)
    worker.start("a")
    worker.fail("s#1")
    await inside(worker, "a#1")
    [failed] = worker.failed()
    assert (failed.code, failed.engine_goes_on) == (Failed.CODE_ENGINE, True)
    assert "shape mismatch" in failed.message


async def test_held_requests_and_suspects_can_be_aborted(worker):
    worker.start("a")
    for name, alone in (("s", 4), ("t", 4), ("b", 0), ("c", 0)):
        worker.start(name, alone=alone)
    worker.dispatcher.abort(["s", "b"])
    await inside(worker, "t#1")
    worker.end("t#1")
    await inside(worker, "c#1")
    assert {"s#1", "b#1"}.isdisjoint(worker.engine.submitted)
    assert worker.dispatcher.requests == 1


async def test_held_requests_of_a_router_that_is_gone_leave(worker):
    other = worker.dispatcher.connect("another router")
    worker.start("s", alone=4)
    worker.start("t", alone=4, session=other)
    worker.start("b", session=other)
    worker.start("c")
    worker.dispatcher.disconnect(other)
    worker.end("s#1")
    await inside(worker, "c#1")
    assert worker.dispatcher.requests == 1


async def test_a_drain_waits_for_held_requests(worker):
    worker.start("s", alone=4)
    worker.start("a")
    worker.dispatcher.drain()
    worker.end("s#1")
    await inside(worker, "a#1")
    worker.end("a#1")
    assert worker.dispatcher.idle


async def test_a_drain_that_times_out_returns_held_requests(worker):
    worker.start("s", alone=4)
    worker.start("t", alone=4)
    worker.start("a")
    assert worker.dispatcher.abort_all() == 3
    await asyncio.sleep(0)
    assert worker.engine.inside == []
    assert worker.codes() == dict.fromkeys("sta", Failed.CODE_DRAINING)


@pytest.mark.parametrize("how", ["held", "not running", "with a held first token"])
async def test_only_running_requests_are_suspects_when_the_engine_fails(worker, how):
    if how == "with a held first token":
        await hold_a_first_token(worker)
        running, others = None, "a"
    else:
        running, others = {"s#1"}, "at"
        for name, alone in (("s", 4), ("a", 0), ("t", 4)):
            worker.start(name, alone=alone if how == "held" else 0)
    worker.dispatcher.on_failure(RuntimeError("CUDA error"), running)
    assert worker.codes() == {"s": Failed.CODE_ENGINE} | dict.fromkeys(others, Failed.CODE_DRAINING)


async def test_a_held_decode_begins_to_load_and_resumes_in_order(worker):
    worker.start("s", alone=4)
    worker.start(with_kv(start("a")))
    worker.first_token("a")
    assert (worker.engine.begun, worker.engine.resumed) == ([], [])
    worker.end("s#1")
    await until(lambda: worker.engine.resumed == ["a#1"], "it goes on")


async def test_a_request_not_yet_in_the_engine_is_not_moved(worker):
    """It waits for its first token."""
    worker.start(with_kv(start("a", **GRAMMAR)))
    comes = worker.incoming("a")
    worker.start("s", alone=4)
    await inside(worker, "s#1")
    comes.on_complete(complete(ord("a")))
    worker.end("s#1")
    await inside(worker, "a#1")
    assert worker.failed() == []


async def test_requests_that_wait_for_kv_stay_during_a_trial(worker):
    worker.start(with_kv(start("a")))
    worker.start(with_kv(start("b")))
    worker.start("s", alone=4)
    await inside(worker, "a#1", "b#1", "s#1")
    for name in "ab":
        worker.incoming(name).on_begun(complete().manifest)
    assert worker.engine.begun == ["a#1", "b#1"], "their pulls go on"
    for name in "ba":
        worker.incoming(name).on_complete(complete(5))
    assert worker.engine.resumed == []
    worker.end("s#1")
    await until(lambda: bool(worker.engine.resumed), "they go on")
    assert worker.engine.resumed == ["b#1", "a#1"]
    assert worker.failed() == []


async def test_a_request_that_has_its_first_token_before_a_trial_is_moved(worker):
    worker.start(with_kv(start("a")))
    worker.first_token("a")
    worker.start("s", alone=4)
    assert worker.engine.submitted == ["a#1"]
    await inside(worker, "s#1")
    assert worker.codes() == {"a": Failed.CODE_DRAINING}


async def test_a_first_token_that_arrives_during_the_grace_period_is_held(worker):
    worker.start("b")
    worker.start(with_kv(start("a")))
    worker.incoming("a").on_begun(complete().manifest)
    worker.start("s", alone=4)
    worker.incoming("a").on_complete(complete(5))
    assert worker.engine.resumed == []
    worker.end("b#1")
    await inside(worker, "a#1", "s#1")
    await until(lambda: worker.engine.resumed == ["a#1"], "the trial's turn ends for it")
    assert [one.request_id for one in worker.failed()] == ["s"]


async def test_a_held_first_token_is_dropped_with_its_request(worker):
    await hold_a_first_token(worker)
    worker.dispatcher.abort(["a"])
    worker.end("s#1")
    worker.start("b")
    await inside(worker, "b#1")
    assert worker.engine.resumed == []


async def test_a_suspect_may_have_a_grammar(worker):
    worker.start("a")
    worker.start("s", alone=4, **GRAMMAR)
    worker.end("a#1")
    await inside(worker, "s#1")


async def test_only_a_decode_without_a_source_can_run_alone(worker):
    for wrong in (start("s", phase=PHASE_PREFILL), with_kv(start("t"))):
        wrong.alone_tokens = 4
        worker.start(wrong)
    assert worker.codes() == dict.fromkeys("st", Failed.CODE_INVALID)
    worker.start("a")
    assert worker.engine.inside == ["a#1"]
