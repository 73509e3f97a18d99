import time
from dataclasses import replace

import pytest

from baton.protos.worker_pb2 import PHASE_DECODE, Failed
from baton.services.router import relay
from baton.services.router.http.admission import Admission, current_admission
from baton.services.router.timings import HttpTimes
from baton.services.router.vllm.engine_client import RefusedByRouter
from harness.fake_worker import Fault, until
from tests.services.router.asking import PROMPT, fill, refused, right


async def full_house(cluster, **limits):
    """Fill a decode worker with requests that do not end. Return it, and the ids; the last one waits."""
    cluster.remake(**limits)
    _, decode = await cluster.pair(step_s=0.001, max_num_seqs=1)
    decode.faults += [Fault(PHASE_DECODE, silent=True)] * 9
    return decode, await fill(cluster)


async def two_full(cluster):
    """Fill two decode workers with one request each. Return them, and the ids; the last one waits."""
    _, first, second = await cluster.pair(decode=2, step_s=0.001, max_num_seqs=1)
    for worker in (first, second):
        worker.faults += [Fault(PHASE_DECODE, silent=True, after_tokens=2)] * 2
    held = await fill(cluster)
    await until(lambda: all(len(cluster.got[one].tokens) == 3 for one in held[:-1]), "the others decode")
    return first, second, held


async def test_requests_without_room_wait(cluster):
    await cluster.pair(step_s=0.001, max_num_seqs=2)
    prompts = [[number] for number in range(40)]
    for number, prompt in enumerate(prompts):
        await cluster.send(f"r{number}", prompt)  # returns before the placement
    await until(lambda: len(cluster.waiting) > 20, "most of them wait")
    assert cluster.count("waiting_requests") == len(cluster.waiting)
    for number, prompt in enumerate(prompts):
        right(await cluster.answer(f"r{number}"), prompt, 8)
    assert cluster.count("wait_seconds_count") > 20
    await cluster.settled()
    assert len(cluster.waiting) == 0


async def test_a_client_may_send_again_right_after_its_last_token(cluster):
    """A slot is free before its request's last token reaches the client."""
    cluster.remake(max_waiting=1)
    await cluster.pair(max_num_seqs=1)
    for number in range(50):
        right(await cluster.ask([number], 3), [number], 3)


async def test_upload_time_does_not_count_as_waiting(cluster, monkeypatch):
    await cluster.pair()
    place = cluster.scheduler.place
    waited = []

    async def noted(asked):
        waited.append(asked.waited_s)
        return await place(asked)

    monkeypatch.setattr(cluster.scheduler, "place", noted)
    now = time.monotonic()
    current_admission.set(Admission(http=HttpTimes(arrived=now - 30, received=now)))
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert waited[0] < 10


async def test_a_full_queue_refuses_and_names_its_bound(cluster):
    await full_house(cluster, max_waiting=1)
    assert refused(await cluster.ask(PROMPT), r"1 wait already \(router.max_waiting\)") == 503
    assert cluster.count("rejections_total", code="QUEUE") == 1
    with pytest.raises(RefusedByRouter, match="max_waiting"):
        cluster.client.check_room()  # called before the prompt is rendered
    assert cluster.count("rejections_total", code="QUEUE") == 2
    assert cluster.count("requests_total", outcome="refused") == 2


async def test_the_client_s_own_deadline_ends_the_wait(cluster):
    await full_house(cluster)
    cluster.client.limits = replace(cluster.client.limits, request_timeout_s=0.4)
    assert refused(await cluster.ask(PROMPT), "waiting for room") == 504


async def test_a_scheduler_that_dies_loses_no_waiting_request(cluster):
    _, decode = await cluster.pair(step_s=0.001, max_num_seqs=1)
    decode.faults.append(Fault(PHASE_DECODE, silent=True))
    while len(cluster.scheduler.standby.workers) < 2:
        await cluster.scheduler.refresh()  # routers do this every second
    held = await fill(cluster)
    await cluster.lose_scheduler()
    decode.faults.clear()
    await cluster.client.abort_requests_async(held[:-1])
    right(await cluster.answer(held[-1]), [0], 8)


async def test_the_first_token_waits_for_a_slot(cluster):
    """A stream must not stand still after its first token because the decode worker's batch is full.

    A loaded KV cache is not a slot: an engine also loads the KV of requests that wait.
    """
    _, decode = await cluster.pair(max_num_seqs=4)
    decode.faults += [Fault(PHASE_DECODE, silent=True, loaded=True)] * 5
    for number in range(4):
        await cluster.send(f"r{number}", [number], 20)
        await until(lambda number=number: cluster.got[f"r{number}"].tokens, "there is a slot for it")
    await cluster.send("last", [9], 20)
    loaded = {"worker": "d0", "transport": "shm"}
    await until(lambda: cluster.count("handoff_seconds_count", **loaded) == 5, "its KV cache is loaded")
    assert cluster.got["last"].tokens == []
    assert cluster.count("time_to_first_token_seconds_count") == 4
    decode.go_on()
    right(await cluster.answer("last"), [9], 20)
    assert cluster.count("time_to_first_token_seconds_count") == 5


async def test_a_request_that_lost_its_worker_goes_before_those_that_wait(cluster):
    """Its client sees a stalled stream."""
    dies, full, held = await two_full(cluster)
    await cluster.send("newcomer", PROMPT)
    await until(lambda: len(cluster.waiting) == 2, "two wait")
    lost = {start.request_id for start in dies.seen.starts}
    stays = [start.request_id for start in full.seen.starts]
    for worker in (dies, full):
        worker.faults.clear()
    await dies.die()
    await until(lambda: len(cluster.waiting) == 2 + len(lost), "it waits, too")
    await cluster.client.abort_requests_async(stays)
    for name in (*lost, held[-1]):
        right(await cluster.answer(name), [0], 8)
    right(await cluster.answer("newcomer"), PROMPT, 8)
    after = [start.request_id for start in full.seen.starts[len(stays) :]]
    assert set(after[: len(lost)]) == lost


async def test_a_worker_that_failed_a_request_is_asked_again_if_the_others_are_full(cluster, monkeypatch):
    """Later requests wait for it, even if only that worker has room."""
    monkeypatch.setattr(relay, "EXCLUDED_S", 0.2)
    fails, _, held = await two_full(cluster)
    lost = {start.request_id for start in fails.seen.starts}
    fails.faults.clear()
    fails.go_on(Fault(PHASE_DECODE, failed=Failed.CODE_STALE))
    for name in (*lost, held[-1]):
        right(await cluster.answer(name), [0], 8)
    assert {start.request_id for start in fails.seen.starts[len(lost) :]} == {*lost, held[-1]}
    await cluster.client.abort_requests_async([one for one in held[:-1] if one not in lost])
