"""A worker's dispatcher forgets a request when it ends, however it ends, and renews leases in time."""

import asyncio
import time

import pytest
import torch
from vllm.v1.outputs import LogprobsTensors

from baton.handoff.reports import Begun
from baton.handoff.vllm.ec_connector import is_whole
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import PHASE_PREFILL, Failed
from baton.services.engine import outputs, wire
from baton.services.engine.errors import RequestRefused
from baton.services.engine.images import metadata_of
from baton.services.engine.step import EngineStep
from baton.services.worker import dispatcher as module
from harness.fake_worker import until
from harness.support import PATIENCE
from tests.services.engine.test_images import feature, item
from tests.services.worker.idle_worker import GRAMMAR, Worker, complete, output, start, with_kv
from tests.services.worker.router import prompt, request


@pytest.fixture
async def worker():
    return Worker()


@pytest.mark.parametrize("error", [ValueError("no such rule"), RuntimeError("the compiler broke")])
async def test_a_grammar_that_cannot_be_compiled_ends_its_request(worker, error):
    worker.compilers.broken = error
    worker.start("a", **GRAMMAR)
    await worker.fails(Failed.CODE_INVALID, str(error))
    assert (worker.dispatcher.requests, worker.engine.submitted) == (0, [])


async def test_a_request_aborted_while_its_grammar_is_compiled_never_reaches_the_engine(worker):
    worker.compilers.compiled.clear()
    worker.start("a", **GRAMMAR)
    [task] = worker.dispatcher._entrance._preparing
    await asyncio.sleep(0)
    worker.dispatcher.abort(["a"])
    async with asyncio.timeout(5 * PATIENCE):
        await asyncio.wait([task])
    assert (worker.dispatcher.requests, worker.engine.submitted, worker.compilers.cancelled) == (0, [], 1)


async def test_clients_of_one_router_take_turns_as_it_numbers_them(worker):
    for name, party in (("a", 7), ("b", 0)):
        message = start(name, **GRAMMAR)
        message.party = party
        worker.start(message)
    async with asyncio.timeout(5 * PATIENCE):
        await asyncio.gather(*worker.dispatcher._entrance._preparing)
    # A router that does not number its clients counts as one.
    assert worker.compilers.parties == [7, -worker.session.number]


async def test_the_requests_of_a_router_that_is_gone_are_aborted(worker):
    stays = worker.dispatcher.connect("stays")
    for name, session in (("a", None), ("b", None), ("c", stays)):
        worker.start(name, session)
    worker.dispatcher.disconnect(worker.session)
    assert worker.engine.aborted == ["a#1", "b#1"]
    assert worker.dispatcher.requests == 1


async def test_refusals_are_counted_by_their_reason(worker):
    worker.start("a", epoch=3)
    worker.start("a", epoch=2)
    assert [one.code for one in worker.failed()] == [Failed.CODE_STALE]
    assert worker.count("requests_refused", why="stale") == 1
    assert worker.dispatcher.requests == 1
    for number in range(4):
        worker.start(f"more {number}")
    assert worker.count("requests_refused", why="full") == 1
    worker.dispatcher.drain()
    worker.start("b")
    assert worker.count("requests_refused", why="draining") == 1


async def test_an_engine_that_still_holds_a_load_is_no_final_refusal(worker):
    worker.start(with_kv(start("a")))
    worker.dispatcher.on_refused("a#1", RequestRefused(Failed.CODE_FULL, "not yet"))
    failed = await worker.failure()
    assert (failed.code, failed.message) == (Failed.CODE_FULL, "not yet")
    assert worker.dispatcher.requests == 0


async def test_a_request_that_needs_its_first_token_waits_for_it(worker):
    worker.start(with_kv(start("a", **GRAMMAR)))
    worker.incoming("a").on_begun(Manifest(request_id="a#1", epoch=1))
    assert (worker.engine.submitted, worker.engine.begun) == ([], [])
    worker.incoming("a").on_complete(complete(ord("a")))
    await until(lambda: worker.engine.submitted == ["a#1"], "its grammar is compiled")
    assert worker.engine.resumed == []


async def test_a_source_that_completes_without_a_token_fails_the_decode(worker):
    worker.start(with_kv(start("a")))
    worker.incoming("a").on_complete(complete())
    assert (await worker.failure()).code == Failed.CODE_HANDOFF
    assert (worker.engine.aborted, worker.dispatcher.requests) == (["a#1"], 0)


@pytest.mark.parametrize("missing", ["address", "key"])
async def test_a_source_without_address_or_key_is_refused(worker, missing):
    worker.start(with_kv(start("a"), **{missing: None}))
    await worker.fails(Failed.CODE_INVALID, "a source needs an address and a key")


async def test_a_source_that_cannot_be_reached_fails_its_decode_alone(worker):
    worker.start("b")
    worker.start(with_kv(start("a")))  # its port is closed
    failed = await worker.failure()
    assert (failed.request_id, failed.code) == ("a", Failed.CODE_SOURCE)
    assert "worker p at 127.0.0.1:9" in failed.message
    assert (worker.engine.aborted, worker.dispatcher.requests) == (["a#1"], 1)
    assert worker.count("handoffs_load_failed", error="TransportFailed") == 1
    await worker.dispatcher.close()


async def test_a_request_that_waits_for_its_kv_is_no_suspect_when_the_engine_fails(worker):
    for name in ("runs", "loaded", "waits"):
        worker.start(start(name) if name == "runs" else with_kv(start(name)))
    worker.incoming("loaded").on_complete(complete(7))
    worker.dispatcher.on_failure(RuntimeError("CUDA error"))
    assert worker.codes() == {
        "runs": Failed.CODE_ENGINE,
        "loaded": Failed.CODE_ENGINE,
        "waits": Failed.CODE_DRAINING,
    }
    await worker.dispatcher.close()


class SilentRanks:
    """Ranks that answer no renewal, and a clock that advances by the time spent waiting."""

    def __init__(self, turns):
        self._turns = turns
        self._began = self._now = time.monotonic()
        self.asked_at = []  # since the start

    def monotonic(self):
        return self._now

    async def sleep(self, seconds):
        """Raise EOFError after the last turn."""
        self._turns -= 1
        if not self._turns:
            raise EOFError
        self._now += seconds

    def renew(self, manifests, timeout_s):
        self.asked_at.append(self._now - self._began)
        self._now += timeout_s
        return {(one.request_id, one.epoch) for one in manifests}


async def test_a_renewal_that_fails_leaves_time_for_another(worker, monkeypatch):
    """One begins every third of a lease, however long the last one took."""
    worker.start("a", phase=PHASE_PREFILL)
    manifest = Manifest(request_id="a#1", epoch=1, lease_s=60.0)
    worker.dispatcher.on_step(EngineStep(begun=(Begun("a#1", 1, manifest),)))
    ranks = SilentRanks(turns=3)
    monkeypatch.setattr(worker.dispatcher, "_handoffs", ranks)
    monkeypatch.setattr(module, "time", ranks)
    monkeypatch.setattr(module.asyncio, "sleep", ranks.sleep)
    with pytest.raises(EOFError):
        await worker.dispatcher.renew_leases(20.0)
    assert ranks.asked_at == pytest.approx([0.0, 20.0, 40.0])


def with_logprobs(name, entries):
    zeros = torch.zeros(entries, 1)
    rows = LogprobsTensors(zeros.int(), zeros, torch.zeros(entries))
    return output(name, new_prompt_logprobs_tensors=rows)


def names(reply):
    decoded = wire.decode_outputs(reply.engine_outputs)
    assert decoded.timestamp == 1.0
    return [one.request_id for one in decoded.outputs]


async def test_large_outputs_of_a_step_are_sent_in_several_replies(worker, monkeypatch):
    monkeypatch.setattr(outputs, "REPLY_BYTES", 100_000)
    for name in "abcd":
        worker.start(name)
    worker.step(with_logprobs("a", 7_000), with_logprobs("b", 2_000), with_logprobs("c", 3_000), "d")
    replies = worker.replies()
    assert [names(reply) for reply in replies] == [["a#1"], ["b#1", "c#1", "d#1"]]
    assert all(reply.ByteSize() < 100_000 for reply in replies)
    worker.step("d")
    assert [names(one) for one in worker.replies()] == [["d#1"]]


async def test_an_output_too_large_for_a_message_fails_its_request_alone(worker, monkeypatch):
    monkeypatch.setattr(outputs, "REPLY_BYTES", 100_000)
    for name in "ab":
        worker.start(name)
    worker.step(with_logprobs("a", 10_000), with_logprobs("b", 10))
    [reply] = worker.replies()
    [failed] = reply.failed
    assert (failed.request_id, failed.code) == ("a", Failed.CODE_INVALID)
    assert "log-probabilities" in failed.message
    assert names(reply) == ["b#1"]
    assert (worker.engine.aborted, worker.dispatcher.requests) == (["a#1"], 1)


async def test_a_start_finds_the_images_that_came_just_before_it():
    """Another router's images may have replaced them in the store by then."""
    worker = Worker(images=True, image_tokens=4)
    for name, told in (("a", None), ("b", Failed.CODE_MEDIA)):
        core = request(name, prompt(20))
        core.mm_features = [metadata_of(feature(1, 2, "i"))]
        if told is None:
            worker.session.received.add("i", item(), 10)
            worker.start("text")
        message = start(name)
        message.engine_request = wire.encode_request(core)
        worker.start(message)
        assert [one.code for one in worker.failed()] == ([told] if told else [])
    assert [is_whole(one) for one in worker.engine.requests["a#1"].mm_features] == [True]
