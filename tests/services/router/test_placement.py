import asyncio

from baton.protos.worker_pb2 import PHASE_DECODE, Failed
from baton.services.router import placement
from baton.services.router.placement import CUT_S, Pairs
from harness.fake_worker import Fault, until
from harness.scheduling import Clock
from tests.services.router.asking import LONG, PROMPT, booked, right

PAIR, OTHER = ("p0", "d0"), ("p0", "d1")


def test_now_and_then_one_tries_a_pair_that_was_cut():
    clock = Clock()
    known = Pairs(clock)
    assert not known.avoid(PAIR)
    known.failed(PAIR)
    assert known.avoid(PAIR)
    assert not known.avoid(OTHER)
    clock.now += CUT_S
    assert [known.avoid(PAIR) for _ in range(3)] == [False, True, True]
    known.failed(PAIR)
    clock.now += CUT_S
    assert not known.avoid(PAIR)
    known.passed(PAIR)
    assert not known.avoid(PAIR)


def test_the_number_of_pairs_is_bounded():
    known = Pairs(Clock())
    for number in range(placement.MOST_PAIRS + 1):
        known.failed((f"p{number}", "d0"))
    assert not known.avoid(("p0", "d0"))
    assert known.avoid((f"p{placement.MOST_PAIRS}", "d0"))


async def test_no_request_is_prefilled_for_a_worker_that_cannot_get_its_kv(cluster):
    """The router reaches both workers; they do not reach each other."""
    prefill, decode = await cluster.pair()
    decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_SOURCE))
    right(await cluster.ask(LONG), LONG, 8)
    for prompt in (PROMPT, LONG):
        right(await cluster.ask(prompt), prompt, 8)
    assert len(prefill.seen.starts) == 1
    assert cluster.count("retries_total", trouble="source", worker=prefill.worker_id) == 1
    assert [start.HasField("source") for start in decode.seen.starts] == [True, False, False, False]
    # Its prompt was booked elsewhere, so it does not count here: the scheduler may give this room away.
    assert decode.seen.starts[2].prompt_tokens == 0


async def test_a_pair_that_is_avoided_is_no_failed_attempt(cluster):
    """The placement is changed before a worker is told, and the prefill worker's booking is freed."""
    prefill, decode = await cluster.pair()
    fails, waits = Fault(PHASE_DECODE, failed=Failed.CODE_SOURCE), Fault(PHASE_DECODE, 2, silent=True)
    decode.faults += [fails, waits, waits]
    await cluster.send("fails", LONG)
    await until(lambda: len(cluster.got["fails"].tokens) > 1, "it decodes")
    recomputed = cluster.count("recomputed_prompts_total")
    await cluster.send("avoids", LONG)
    await until(lambda: len(cluster.got["avoids"].tokens) > 1, "it decodes")
    await booked(cluster, prefill.worker_id, prompt_tokens=0, requests=0)
    await cluster.client.abort_requests_async(["fails", "avoids"])
    await cluster.settled()
    [record] = [one for one in cluster.chronicle.recent.last() if one.response_id == "avoids"]
    assert (len(record.attempts), record.retried) == (1, False)
    assert cluster.count("pairs_avoided_total") == 1
    assert cluster.count("recomputed_prompts_total") == recomputed
    assert cluster.count("live_requests") == 0


async def test_a_request_that_leaves_while_a_pair_is_avoided_is_counted_out_once(cluster, monkeypatch):
    *_, decode = await cluster.pair(prefill=2)
    decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_SOURCE))
    right(await cluster.ask(LONG), LONG, 8)
    monkeypatch.setattr(placement.Pairs, "avoid", lambda *_: True)
    asked = 0
    place = cluster.scheduler.place

    async def hangs(need):
        nonlocal asked
        asked += 1
        if asked == 2:
            await asyncio.sleep(60)
        return await place(need)

    monkeypatch.setattr(cluster.scheduler, "place", hangs)
    await cluster.send("leaves", LONG)
    await until(lambda: asked == 2, "another pair is asked for")
    await cluster.client.abort_requests_async(["leaves"])
    await cluster.settled()
    assert cluster.count("live_requests") == 0


async def test_another_pair_is_used_until_one_is_joined_again(cluster):
    now = 0.0
    cluster.remake(pairs_clock=lambda: now)
    first, second, decode = await cluster.pair(prefill=2)
    decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_SOURCE))
    right(await cluster.ask(LONG), LONG, 8)
    cut, other = sorted((first, second), key=lambda worker: worker.seen.starts[0].epoch)
    for number in range(4):
        right(await cluster.ask([number, *LONG]), [number, *LONG], 8)
    assert (len(cut.seen.starts), len(other.seen.starts)) == (1, 5)
    now = placement.CUT_S
    for number in range(8):
        right(await cluster.ask([number, 1, *LONG]), [number, 1, *LONG], 8)
    assert len(cut.seen.starts) > 1
