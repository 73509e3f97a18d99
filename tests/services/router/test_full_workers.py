"""Workers enforce their own limits: what a Start says about its booking, and what follows a refusal."""

import asyncio

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, PHASE_SAVE, Failed
from baton.services.router import relay
from harness import scheduling
from harness.fake_worker import BLOCK_SIZE, FakeWorker, Fault, answer, until
from harness.support import PATIENCE
from tests.services.router.asking import LONG, PROMPT, booked, right, share
from tests.services.router.test_prefix import PROMPT as CHAT
from tests.services.router.test_prefix import holding

FULL = Failed.CODE_FULL
READY = pb.WORKER_STATE_READY


def told(*starts):
    return [(start.prompt_tokens, start.blocks) for start in starts]


def phases(worker):
    return [start.phase for start in worker.seen.starts]


def blocks(prompt, output):
    return -(-(len(prompt) + output + 1) // BLOCK_SIZE)  # plus one lookahead token


async def known(cluster):
    """Wait until the router's snapshot has all workers."""

    async def so():
        await cluster.scheduler.refresh()
        ready = (one.identity.worker_id for one in cluster.scheduler.standby.workers if one.state == READY)
        return set(ready) == cluster.members.workers.keys()

    await scheduling.until(so)


async def test_a_prompt_that_a_worker_runs_alone_frees_its_room_with_the_first_token(cluster):
    mixed = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED, step_s=0.05))
    await cluster.send("long", LONG, 40)
    await until(lambda: cluster.got["long"].tokens, "it decodes")

    await booked(cluster, "m0", prompt_tokens=0, requests=1, decoding=1)
    assert (phases(mixed), told(*mixed.seen.starts)) == ([PHASE_DECODE], [(len(LONG), blocks(LONG, 40))])
    right(await cluster.answer("long"), LONG, 40)


async def test_without_a_scheduler_the_router_states_its_own_booking(cluster):
    prefill, decode = await cluster.pair()
    await known(cluster)
    await cluster.lose_scheduler()
    right(await cluster.ask(LONG), LONG, 8)
    assert told(*prefill.seen.starts, *decode.seen.starts) == [(len(LONG), 0), (0, blocks(LONG, 8))]


async def test_starts_without_a_booking_state_none(cluster):
    """Saves of cached blocks, and trials: these may run on workers outside their placement."""
    _, decode = await holding(cluster)
    decode.faults.append(Fault(PHASE_SAVE, failed=Failed.CODE_HANDOFF))
    right(await cluster.ask(CHAT), CHAT, 8)
    decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_ENGINE, goes_on=True))
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    unbooked = [one for one in decode.seen.starts if one.phase == PHASE_SAVE or one.alone_tokens]
    assert len(unbooked) == 2
    assert told(*unbooked) == [(0, 0), (0, 0)]


async def test_a_full_prefill_worker_is_left_alone_for_that_try_only(cluster):
    first, second, *decodes = await cluster.pair(prefill=2, decode=2)
    await known(cluster)
    share((first, second), Fault(PHASE_PREFILL, failed=FULL))
    share(decodes, *[Fault(PHASE_DECODE, 5, silent=True)] * 2)  # the first attempt fails before that
    await cluster.send("q", LONG, 20)
    await until(lambda: len(cluster.got["q"].tokens) == 6, "it decodes")
    full, other = sorted((first, second), key=lambda worker: worker.seen.starts[0].epoch)
    assert phases(full) == phases(other) == [PHASE_PREFILL]
    assert cluster.count("retries_total", trouble="full", worker=full.worker_id) == 1
    await cluster.members.leave(other)
    for one in decodes:
        one.go_on(Fault(PHASE_DECODE, 5, die=True))
    right(await cluster.answer("q"), LONG, 20)
    assert phases(full) == [PHASE_PREFILL, PHASE_PREFILL]  # it is asked again


@pytest.mark.parametrize("phase", [PHASE_PREFILL, PHASE_DECODE])
async def test_the_other_side_does_not_take_over_for_a_full_worker(cluster, monkeypatch, phase):
    """Long prompts on a decode worker stall its streams; answers on a prefill worker delay its prompts."""
    monkeypatch.setattr(relay, "EXCLUDED_S", 60.0)  # the test fails if the request waits this long
    cluster.remake(max_attempts=1)
    prefill, decode = await cluster.pair()
    await known(cluster)
    full = prefill if phase == PHASE_PREFILL else decode
    full.faults += [Fault(phase, failed=FULL) for _ in range(3)]
    right(await cluster.ask(LONG), LONG, 8)
    assert (set(phases(prefill)), set(phases(decode))) == ({PHASE_PREFILL}, {PHASE_DECODE})
    assert all(start.HasField("source") for start in decode.seen.starts)
    assert cluster.count("retries_total", trouble="full", worker=full.worker_id) == 3


async def test_a_request_does_not_wait_for_other_full_workers(cluster, monkeypatch):
    """The worker that refused may have room sooner."""
    monkeypatch.setattr(relay, "EXCLUDED_S", 60.0)
    _, first, second = await cluster.pair(decode=2, max_num_seqs=1)
    await known(cluster)
    faults = share((first, second), Fault(PHASE_DECODE, silent=True), Fault(PHASE_DECODE, failed=FULL))
    await cluster.send("stays", LONG)
    await until(lambda: len(faults) == 1, "one of them is taken")
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert cluster.count("request_attempts_sum") == 2
    await cluster.client.abort_requests_async(["stays"])


async def test_a_suspect_that_finds_its_worker_full_is_tried_there_later(cluster):
    _, decode = await cluster.pair()
    fails = Fault(PHASE_DECODE, failed=Failed.CODE_ENGINE, goes_on=True)
    decode.faults += [fails, Fault(PHASE_DECODE, failed=FULL)]
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    assert [start.alone_tokens > 0 for start in decode.seen.starts] == [False, True, True, False]


async def test_an_overbooked_worker_takes_as_many_requests_as_it_can(cluster):
    """The scheduler assumes more room than there is: requests are retried, and none fails."""
    cluster.remake(max_attempts=1)
    mixed = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED, step_s=0.002))
    await known(cluster)
    mixed.most = 3
    prompts = [[number, number + 1] for number in range(24)]
    async with asyncio.timeout(20 * PATIENCE):
        answers = await asyncio.gather(*(cluster.ask(prompt, 6) for prompt in prompts))
    for prompt, got in zip(prompts, answers, strict=True):
        assert got.tokens == answer(prompt, 6)
    assert mixed.fullest == 3
    assert cluster.count("retries_total", trouble="full", worker="m0") > 0
