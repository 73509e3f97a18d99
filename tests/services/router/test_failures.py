"""Workers that fail on demand: the request continues elsewhere, and each token comes once."""

import asyncio
import re
import time

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, Failed
from baton.scheduler.placer import Placer
from baton.scheduler.policy import NoChoice
from baton.services.router import pool, worker_stream
from harness.fake_worker import FakeWorker, Fault, answer, until
from harness.router import Cluster
from harness.scheduling import until_told
from harness.support import PATIENCE
from tests.services.router.asking import LONG, PROMPT, booked, refused, right, share

REFUSALS = (Failed.CODE_FULL, Failed.CODE_STAGING, Failed.CODE_DRAINING)


@pytest.mark.parametrize(
    "how", [{"die": True}, *({"failed": code} for code in (*REFUSALS, Failed.CODE_STALE))]
)
async def test_another_worker_prefills(cluster, how):
    first, second, decode = await cluster.pair(prefill=2)
    share((first, second), Fault(PHASE_PREFILL, **how))
    started = time.monotonic()
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert time.monotonic() - started < 2 * PATIENCE
    chosen, other = sorted((first, second), key=lambda worker: worker.seen.starts[0].epoch)
    assert [start.epoch for start in chosen.seen.starts] == [1]
    assert [start.epoch for start in other.seen.starts] == [2]
    sources = {start.epoch: start.source for start in decode.seen.starts}
    assert sources[2].worker_id == other.worker_id
    failed = sources.get(1)  # the prefill may fail before the decode worker is connected
    assert failed is None or (failed.worker_id == chosen.worker_id and failed.key != sources[2].key)


@pytest.mark.parametrize("how", ["refuses", "is older"])
async def test_a_worker_that_does_not_fit_is_left_alone(cluster, how, caplog):
    first, second, _ = await cluster.pair(prefill=2, connect=False)
    if how == "refuses":
        why = first.refusal = "vLLM 0.31 here, 0.32 there"
    else:
        first.protocol -= 1
        why = f"it speaks protocol {first.protocol}"
    asked = 0
    while why not in caplog.text or asked < 6:  # among equals the scheduler chooses at random
        assert asked < 40
        right(await cluster.ask(PROMPT), PROMPT, 8)
        asked += 1
    assert first.seen.starts == []
    assert len(second.seen.starts) == asked


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("not_kept", [True, False], ids=["not kept", "not loaded"])
async def test_a_handoff_fails(cluster, prompt, not_kept):
    """A short prompt is prefilled again by the decode worker, a long one by another prefill worker."""
    first, second, decode = await cluster.pair(prefill=2)
    if not_kept:
        share((first, second), Fault(PHASE_PREFILL, not_kept=True))
    else:
        decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_HANDOFF))
    right(await cluster.ask(prompt), prompt, 8)
    last = decode.seen.starts[-1]
    epochs = [start.epoch for start in decode.seen.starts]
    assert epochs == sorted(set(epochs))  # workers refuse an epoch that they have seen
    assert list(last.output_token_ids) == answer(prompt, 1)
    assert cluster.count("recomputed_prompts_total") == (prompt is PROMPT)
    if prompt is PROMPT:
        assert not last.HasField("source")
    else:
        _, other = sorted((first, second), key=lambda worker: worker.seen.starts[0].epoch)
        assert last.source.worker_id == other.worker_id


async def test_a_placement_that_is_kept_stays_booked(cluster, monkeypatch):
    """Another pair was found, but other requests took its room."""
    await cluster.pair(prefill=2)
    place = Placer.place

    def late(placer, need):
        if need.attempt.epoch > 1:
            return NoChoice(pb.Rejection.CODE_FULL, "all are full")
        return place(placer, need)

    monkeypatch.setattr(Placer, "place", late)
    faults = [Fault(PHASE_DECODE, failed=Failed.CODE_HANDOFF), Fault(PHASE_DECODE, 2, silent=True)]
    share(cluster.members.workers.values(), *faults)
    await cluster.send("q", LONG)
    await until(lambda: len(cluster.got["q"].tokens) > 1, "it decodes")
    for name in ("p0", "p1"):
        await booked(cluster, name, requests=0)
    await booked(cluster, "d0", requests=1)


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("how", ["die", "drain"])
async def test_another_worker_continues_the_answer(cluster, after, how):
    prefill, first, second = await cluster.pair(decode=2, step_s=0.002)
    how_it_fails = {"die": True} if how == "die" else {"failed": Failed.CODE_DRAINING}
    share((first, second), Fault(PHASE_DECODE, after, **how_it_fails))
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    _, other = sorted((first, second), key=lambda worker: worker.seen.starts[0].epoch)
    [start] = other.seen.starts
    so_far = list(start.output_token_ids)
    assert so_far == answer(PROMPT, len(so_far))
    assert [list(one.output_token_ids) for one in prefill.seen.starts] == [[], so_far]
    assert (start.epoch, start.source.tokens) == (2, len(PROMPT) + len(so_far))
    assert start.source.key == prefill.seen.starts[1].key != prefill.seen.starts[0].key
    # The new prefill adds one token. A worker that refuses does so before the first token.
    assert len(so_far) == after + 1 or (how, after) == ("drain", 0)


@pytest.mark.parametrize(
    ("limits", "status", "because"),
    [
        ({"request_timeout_s": 0.7}, 504, "longer than 0.7 s"),
        ({"replace_wait_s": 0.7}, 503, "can take over within 0.7 s (a tenth of router.request_timeout_s)"),
    ],
    ids=["its own deadline", "the wait for a worker"],
)
async def test_no_other_worker_can_decode(cluster, limits, status, because):
    """The request waits until its limit, and its error says what happened."""
    cluster.remake(**limits)
    for one in await cluster.pair():
        one.faults.append(Fault(PHASE_DECODE, 3, die=True))
    got = await cluster.ask(PROMPT, 20)
    tokens = answer(PROMPT, 7)  # one of the prefill, three of each decode worker
    assert refused(got, re.escape(because), tokens) == status
    assert re.search("worker [pd]0", str(got.error))


@pytest.mark.parametrize(
    ("prompt", "crosses"),
    [(PROMPT, False), (LONG, False), (PROMPT, True)],
    ids=["recomputed", "prefilled elsewhere", "with a token in flight"],
)
async def test_a_prefill_worker_that_hangs_during_the_pull_is_given_up(cluster, prompt, crosses):
    """The pull's own deadline is much later. A token in flight does not count for the next attempt."""
    cluster.remake(silence_s=0.5)
    *prefills, decode = await cluster.pair(prefill=2)
    decode.faults.append(Fault(PHASE_DECODE, silent=True, crosses=crosses))  # it waits for the KV
    asking = asyncio.create_task(cluster.ask(prompt, 20))
    await until(lambda: "q0" in cluster.got and cluster.got["q0"].tokens, "the pull has begun")
    [source] = [one for one in prefills if one.seen.starts]
    source.hangs = True
    right(await asking, prompt, 20)
    assert decode.seen.aborts == [decode.seen.starts[0].request_id]
    assert [start.epoch for start in decode.seen.starts] == [1, 2]
    assert cluster.count("retries_total", trouble="handoff", worker=source.worker_id) == 1


def with_weights(fingerprint, name):
    worker = FakeWorker(name, pb.ROLE_MIXED)
    worker.model_fingerprint = fingerprint
    return worker


async def test_an_answer_continues_on_the_same_weights(cluster):
    """Before the first token, workers with any weights may take over."""
    old = await cluster.members.add(with_weights("f1", "old"))
    old.faults.append(Fault(PHASE_DECODE, 5, die=True))
    asking = asyncio.create_task(cluster.ask(PROMPT, 20))
    await until(lambda: old.seen.starts, "the old one has begun")
    new = [await cluster.members.add(with_weights("f2", f"new{number}")) for number in range(2)]
    await until(lambda: cluster.count("retries_total", trouble="lost", worker="old") == 1, "it was lost")
    other = await cluster.members.add(with_weights("f1", "other"))
    right(await asking, PROMPT, 20)
    assert [list(start.output_token_ids) for start in other.seen.starts] == [answer(PROMPT, 5)]
    assert not any(worker.seen.starts for worker in new)
    await cluster.members.leave(other)
    share(new, Fault(PHASE_DECODE, 0, die=True))
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    assert all(worker.seen.starts for worker in new)


async def test_workers_of_another_vllm_are_not_asked(cluster):
    """Their requests are encoded differently."""
    theirs, ours = FakeWorker("theirs", pb.ROLE_MIXED), FakeWorker("ours", pb.ROLE_MIXED)
    theirs.vllm_version, theirs.refusal = "0.1.0", "another vLLM"
    for worker in (theirs, ours):
        await cluster.members.add(worker)
    for _ in range(6):
        right(await cluster.ask(PROMPT), PROMPT, 8)
    assert not theirs.seen.starts
    assert cluster.count("retries_total", trouble="unreachable", worker="theirs") == 0


@pytest.mark.parametrize("after", [0, 3])
async def test_a_request_that_lost_its_worker_waits_for_one_that_comes_back(cluster, after):
    """This holds even without a token: the request was admitted, so its client should not notice the loss."""
    mixed = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    mixed.faults.append(Fault(PHASE_DECODE, after, die=True))
    asking = asyncio.create_task(cluster.ask(PROMPT, 20))
    await until(lambda: cluster.count("rejections_total", code="NO_WORKERS"), "no worker is there")
    assert not cluster.got["q0"].over
    again = await cluster.members.add(FakeWorker("m0-again", pb.ROLE_MIXED))
    right(await asking, PROMPT, 20)
    assert len(again.seen.starts) == 1


async def test_the_only_worker_is_asked_again(cluster):
    """Its stream broke, but it still sends heartbeats, and there is no other worker."""
    mixed = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    mixed.faults.append(Fault(PHASE_DECODE, 3, failed=Failed.CODE_STALE))
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    assert [list(start.output_token_ids) for start in mixed.seen.starts] == [[], answer(PROMPT, 3)]


@pytest.mark.parametrize(("code", "trouble"), [*zip(REFUSALS, ("full", "refused", "refused"), strict=True)])
async def test_refusals_use_up_no_attempt(cluster, code, trouble):
    cluster.remake(max_attempts=1)
    mixed = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    mixed.faults += [Fault(PHASE_DECODE, failed=code) for _ in range(2)]
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert len(mixed.seen.starts) == 3
    assert cluster.count("retries_total", trouble=trouble, worker="m0") == 2


@pytest.mark.parametrize(("phase", "after"), [(PHASE_PREFILL, 0), (PHASE_DECODE, 0), (PHASE_DECODE, 4)])
async def test_a_hung_worker_counts_as_lost(cluster, phase, after):
    """Its connections stay open and its lease is valid: only the silent stream reveals it."""
    cluster.remake(silence_s=0.4)
    workers = await cluster.pair(prefill=2, decode=2)
    share(workers, Fault(phase, after, hang=True))
    began = time.monotonic()
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    assert time.monotonic() - began < 2 * PATIENCE
    [hung] = [worker for worker in workers if worker.hangs]
    assert cluster.count("retries_total", trouble="lost", worker=hung.worker_id) == 1
    right(await cluster.ask(PROMPT), PROMPT, 8)  # it is avoided from now on
    assert len(hung.seen.starts) == 1


async def test_a_hung_worker_is_lost_with_its_gang(cluster):
    """The other members of its gang notice the loss, and end, before this router notices it."""
    cluster.remake(silence_s=600.0)
    await cluster.pair(decode=0)
    gang = [FakeWorker(f"g{rank}", pb.ROLE_DECODE) for rank in range(3)]
    for rank, worker in enumerate(gang):
        worker.gang = pb.Gang(name="g", rank=rank, size=3, life="g0/1")
        await cluster.connect(await cluster.members.add(worker))
    share(gang, Fault(PHASE_DECODE, 3, hang=True))
    await cluster.send("q", PROMPT, 20)
    await until(lambda: len(cluster.got["q"].tokens) == 4, "all that it sent before it hung has arrived")
    hung, ending, well = sorted(gang, key=lambda worker: not worker.hangs)
    for _ in range(worker_stream.GANG_CHECKS + 1):  # the first sees the messages before the hang
        cluster.pool.opened(hung.worker_id).check_silence(600.0)
    other = await cluster.members.add(FakeWorker("d0", pb.ROLE_DECODE))
    await ending.die()
    right(await cluster.answer("q"), PROMPT, 20)
    assert cluster.count("retries_total", trouble="lost", worker=hung.worker_id) == 1
    assert len(other.seen.starts) == 1
    assert cluster.pool.suspects() == {worker.worker_id for worker in gang}
    assert well.worker_id in cluster.pool.reached()  # it is not silent


async def test_a_worker_cut_off_from_this_router_delays_no_later_request(cluster, monkeypatch):
    """The scheduler still gets its heartbeats and places requests on it."""
    monkeypatch.setattr(pool, "SUSPECT_S", 0.5)
    monkeypatch.setattr(worker_stream, "CALL_TIMEOUT_S", 1.5)
    cluster.remake(silence_s=1.0)
    _, first, second = await cluster.pair(decode=2)
    share((first, second), Fault(PHASE_DECODE, 3, hang=True))
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    cut = first if first.hangs else second
    longest, end = 0.0, time.monotonic() + 2.5  # it is tried again within 2 s
    while time.monotonic() < end:
        began = time.monotonic()
        right(await cluster.ask(PROMPT), PROMPT, 8)
        longest = max(longest, time.monotonic() - began)
        await asyncio.sleep(0.05)
    assert longest < 1.0
    assert len(cut.seen.starts) == 1
    cut.hangs = False
    await until(lambda: not cluster.pool.suspects(), "it is reached again")


async def test_workers_that_only_the_scheduler_lost_still_serve():
    async with Cluster(worker_lease_s=2.0) as cluster:
        prefill, decode = await cluster.pair()
        right(await cluster.ask(PROMPT), PROMPT, 8)
        await cluster.scheduler.refresh()
        for worker in (prefill, decode):
            await cluster.members.lose(worker)
        await until_told(cluster.scheduler, lambda told: not told.workers)
        await cluster.scheduler.refresh(reached=cluster.pool.reached())
        right(await cluster.ask(PROMPT), PROMPT, 8)
        assert len(prefill.seen.starts) == len(decode.seen.starts) == 2
        await cluster.members.leave(prefill)
        await cluster.settled()


async def test_a_router_that_was_suspended_does_not_blame_its_workers(cluster):
    cluster.remake(silence_s=0.3)
    _, decode = await cluster.pair(step_s=0.01)
    await cluster.send("q", PROMPT, 60)
    await until(lambda: len(cluster.got["q"].tokens) > 3, "it writes")
    time.sleep(1.0)  # noqa: ASYNC251 (as a stopped process would)
    right(await cluster.answer("q"), PROMPT, 60)
    assert len(decode.seen.starts) == 1


async def test_progress_resets_the_budget_of_failures(cluster):
    cluster.remake(max_attempts=2)
    faults = share(await cluster.pair(decode=2), *[Fault(PHASE_DECODE, 2, failed=Failed.CODE_STALE)] * 5)
    right(await cluster.ask(PROMPT, 200), PROMPT, 200)
    assert not faults


async def test_a_request_that_a_worker_cannot_parse_is_not_retried(cluster):
    first, second, _ = await cluster.pair(prefill=2)
    for worker in (first, second):
        worker.faults.append(Fault(PHASE_PREFILL, failed=Failed.CODE_INVALID))
    assert refused(await cluster.ask(PROMPT), "the test wants it") == 400
    assert len(first.seen.starts) + len(second.seen.starts) == 1


async def test_a_complete_answer_is_not_admitted_again(cluster):
    """The worker dies after the last token, before its finish reason."""
    *_, first, second = await cluster.pair(decode=2)
    for worker in (first, second):
        worker.faults.append(Fault(PHASE_DECODE, 7, die=True))
    await cluster.send("q", PROMPT, 30)
    cluster.client._relays["q"].state.max_tokens = 8  # the fake workers still generate 30
    right(await cluster.answer("q"), PROMPT, 8)
    assert len(first.seen.starts) + len(second.seen.starts) == 1
