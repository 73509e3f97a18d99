"""Two legs at the same time: the order of tokens, and the consequences when one of them fails."""

import asyncio
import time

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, Failed
from baton.services.router import legs
from harness.fake_worker import EOS, FakeWorker, Fault, until
from harness.support import PATIENCE
from tests.services.router.asking import LONG, PROMPT, recorded, right, share


async def test_tokens_of_the_decode_worker_wait_for_the_first_one(cluster):
    """The prefill worker's messages to the router are slow, the handoff is quick."""
    prefill, decode = await cluster.pair()
    prefill.wire.clear()
    await cluster.send("q", PROMPT)
    await until(lambda: decode.seen.starts and not decode.running, "the decode worker has put all tokens out")
    assert cluster.got["q"].tokens == []
    prefill.wire.set()
    right(await cluster.answer("q"), PROMPT, 8)
    assert decode.seen.aborts == []
    record = await recorded(cluster)
    assert all(one.seconds >= 0 for one in record.stages)
    stages = {one.name: one for one in record.stages}
    assert stages["handoff"].end < stages["reply"].end, "it was loaded before the first token came here"
    assert cluster.count("handoff_seconds_count", worker="d0", transport="shm") == 1


async def test_tokens_that_wait_are_not_used_if_the_prefill_fails(cluster):
    *prefills, decode = await cluster.pair(prefill=2)
    for one in prefills:
        one.wire.clear()
    await cluster.send("q", PROMPT, 20)
    await until(lambda: decode.seen.starts and not decode.running, "the decode worker has put all tokens out")
    [source] = [one for one in prefills if one.seen.starts]
    await source.die()  # before its first token has arrived
    for one in prefills:
        one.wire.set()
    right(await cluster.answer("q"), PROMPT, 20)
    assert [list(start.output_token_ids) for start in decode.seen.starts] == [[], []]
    assert cluster.count("retries_total", trouble="lost", worker=source.worker_id) == 1
    assert cluster.count("request_attempts_sum") == 2
    await cluster.settled()


async def test_a_late_first_token_does_not_cut_the_answer(cluster):
    """More tokens are held back than the journal had memory reserved for."""
    prefill, decode = await cluster.pair()
    prefill.wire.clear()
    decode.per_step = 50
    await cluster.send("q", PROMPT, 900)
    await until(lambda: decode.seen.starts and not decode.running, "the decode worker has put all tokens out")
    prefill.wire.set()
    right(await cluster.answer("q"), PROMPT, 900)


@pytest.mark.parametrize("late", [False, True], ids=["before the decode worker's failure", "after it"])
async def test_a_first_token_that_ends_the_request_ends_both_legs(cluster, late):
    """A stop token: the prefill worker has nothing to hand over, and the decode worker may say so first."""
    prefill, decode = await cluster.pair()
    prefill.eos_at = 0
    if late:
        prefill.wire.clear()
    await cluster.send("q", PROMPT, 20)
    if late:
        await until(lambda: decode.seen.starts and not decode.running, "the decode worker has failed")
        prefill.wire.set()
    got = await cluster.answer("q")
    assert (got.reason, got.tokens) == ("stop", [EOS])
    await cluster.settled()
    await until(lambda: decode.running == [], "the decode worker does not wait for it")
    assert [len(one.seen.starts) for one in (prefill, decode)] == [1, 1]


def prefills_long(worker):
    """Have a worker's next prefill wait for `go_on`."""
    worker.faults.append(Fault(PHASE_PREFILL, silent=True))


@pytest.mark.parametrize(
    ("fault", "trouble", "counts"),
    [
        ({"failed": Failed.CODE_FULL}, "full", False),
        ({"failed": Failed.CODE_DRAINING}, "refused", False),
        ({"failed": Failed.CODE_STALE}, "stale", True),
        ({"failed": Failed.CODE_ENGINE, "early": True}, "unreachable", False),
        ({"die": True, "early": True}, "unreachable", False),
    ],
    ids=str,
)
async def test_a_decode_worker_that_fails_early_ends_the_prefill(cluster, fault, trouble, counts):
    cluster.remake(max_attempts=1)
    prefill, first, second = await cluster.pair(decode=2)
    await cluster.connect(prefill)
    prefills_long(prefill)
    share((first, second), Fault(PHASE_DECODE, **fault))
    began = time.monotonic()
    got = await cluster.ask(LONG)
    assert time.monotonic() - began < 2 * PATIENCE, "it is not noticed when the prompt is prefilled"
    failing = next(one for one in (first, second) if one.seen.starts and one.seen.starts[0].epoch == 1)
    assert cluster.count("retries_total", trouble=trouble, worker=failing.worker_id) == 1
    await until(lambda: prefill.seen.aborts, "the prefill is stopped")
    if counts:
        assert "1 workers of at most 1 failed under the request" in str(got.error)
    else:
        right(got, LONG, 8)
        assert [start.epoch for start in prefill.seen.starts] == [1, 2]
        assert cluster.count("suspects_total", end="passed") == 0


async def test_decode_workers_lost_before_they_begin_make_no_suspect(cluster):
    """They do not count: after the prefill, four lost workers would end the request."""
    workers = await cluster.pair(decode=6)
    for _ in range(5):
        prefills_long(workers[0])
    share(workers[1:], *[Fault(PHASE_DECODE, die=True, early=True)] * 5)
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert not any(start.alone_tokens for one in workers for start in one.seen.starts)


async def test_a_decode_worker_that_is_not_reached_ends_the_prefill(cluster):
    prefill, gone = await cluster.pair(connect=False)
    await cluster.connect(prefill)
    await gone.die()
    prefills_long(prefill)
    await cluster.send("q", LONG)
    await until(lambda: prefill.seen.aborts, "the prefill is stopped")
    right(await cluster.answer("q"), LONG, 8)
    assert [start.phase for start in prefill.seen.starts] == [PHASE_PREFILL, PHASE_DECODE]
    assert cluster.count("retries_total", trouble="unreachable", worker="d0") >= 1


async def test_a_source_that_cannot_be_followed_ends_the_prefill(cluster):
    """The prefill worker is healthy, but the decode worker cannot reach it."""
    prefill, decode = await cluster.pair()
    prefills_long(prefill)
    decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_SOURCE, early=True))
    right(await cluster.ask(PROMPT), PROMPT, 8)
    starts = [(start.epoch, start.HasField("source"), start.prompt_tokens) for start in decode.seen.starts]
    assert starts == [(1, True, 0), (2, False, 0)]  # the prompt was booked elsewhere
    assert (len(prefill.seen.starts), prefill.running) == (1, [])
    assert cluster.count("retries_total", trouble="source", worker="p0") == 1
    assert cluster.count("recomputed_prompts_total") == 1


@pytest.mark.parametrize("first", ["the decode worker says so", "its own stream ends"])
async def test_a_prefill_worker_that_dies_is_lost_once(cluster, monkeypatch, first):
    monkeypatch.setattr(legs, "SOURCE_ENDS_S", 5.0 * PATIENCE)
    *prefills, decode = await cluster.pair(prefill=2)
    for one in prefills:
        prefills_long(one)
    if first.startswith("the decode"):
        decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_SOURCE, early=True))
    await cluster.send("q", LONG)
    await until(lambda: decode.seen.starts and any(one.seen.starts for one in prefills), "it is prefilled")
    if first.startswith("the decode"):
        await until(lambda: decode.running == [], "the decode worker has given it up")
    [dead] = [one for one in prefills if one.seen.starts]
    [other] = [one for one in prefills if one is not dead]
    other.faults.clear()
    await dead.die()
    right(await cluster.answer("q"), LONG, 8)
    assert cluster.count("retries_total", trouble="lost", worker=dead.worker_id) == 1
    assert cluster.count("request_attempts_sum") == 2
    assert [start.epoch for start in decode.seen.starts] == [1, 2]


async def test_a_prefill_that_fails_ends_the_decode_worker_s_wait(cluster):
    """The staging of a 1P1D that stays full causes this (docs/decisions/0038)."""
    prefill, decode = await cluster.pair()
    prefill.faults.append(Fault(PHASE_PREFILL, failed=Failed.CODE_STAGING))
    decode.faults += [Fault(PHASE_DECODE, 99), Fault(PHASE_DECODE, 2, silent=True)]
    await cluster.send("q", LONG, 20)
    await until(lambda: len(cluster.got["q"].tokens) == 2, "the decode worker computes it")
    failed, again = decode.seen.starts
    assert (failed.epoch, again.epoch) == (1, 2)
    assert not again.HasField("source")
    assert decode.seen.aborts[0] == failed.request_id
    decode.go_on()
    right(await cluster.answer("q"), LONG, 20)
    assert cluster.count("retries_total", trouble="refused", worker="p0") == 1
    right(await cluster.ask(PROMPT), PROMPT, 8)  # the next request tries it again
    assert len(prefill.seen.starts) == 2


async def test_an_abort_reaches_both_while_the_prompt_is_prefilled(cluster):
    prefill, decode = await cluster.pair()
    prefills_long(prefill)
    await cluster.send("q", PROMPT)
    await until(lambda: decode.running and prefill.running, "both have it")
    await cluster.client.abort_requests_async(["q"])
    await until(lambda: decode.running == prefill.running == [], "both have dropped it")
    assert decode.seen.aborts == prefill.seen.aborts == ["q"]
    await cluster.settled()
    assert (await cluster.scheduler.describe()).handoffs[0].outcome == "abort"


class Slow(FakeWorker):
    """A decode worker that answers the router's Hello only once `may` is set."""

    def __init__(self):
        super().__init__("d0", pb.ROLE_DECODE)
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def Hello(self, request, context):
        self.asked.set()
        await self.may.wait()
        return await super().Hello(request, context)


@pytest.fixture
async def slow(cluster):
    """Yield a decode worker that is connected late, after a request was sent."""
    await cluster.members.add(FakeWorker("p0", pb.ROLE_PREFILL))
    decode = await cluster.members.add(Slow())
    await cluster.send("q", PROMPT)
    return decode


async def test_a_late_connected_decode_worker_gets_the_state_at_the_start(cluster, slow):
    """The client has the first token by then; the decode worker gets it from the prefill worker."""
    await until(lambda: cluster.got["q"].tokens, "the prompt is prefilled")
    slow.may.set()
    right(await cluster.answer("q"), PROMPT, 8)
    assert [list(start.output_token_ids) for start in slow.seen.starts] == [[]]


async def test_a_decode_worker_that_connects_too_late_gets_no_start(cluster, slow):
    await slow.asked.wait()
    await cluster.client.abort_requests_async(["q"])
    await cluster.settled()
    slow.may.set()
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert [start.request_id for start in slow.seen.starts] == ["q1"]


async def test_a_prompt_of_several_steps(cluster):
    prefill, decode = await cluster.pair(step_s=0.02)
    prefill.steps = 4
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert [start.phase for start in decode.seen.starts] == [PHASE_DECODE]
    record = await recorded(cluster)
    [stage] = [one for one in record.stages if one.name == "prefill"]
    assert stage.attributes == {"chunks": 4}
