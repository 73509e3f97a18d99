"""Records of finished requests, made over real streams to fake workers, and which of them are kept."""

import pytest

from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, Failed
from baton.services.router import worker_stream
from baton.services.router.chronicle import WINDOW_S, Recent
from baton.services.router.record import record_of
from baton.services.router.state import RequestState
from baton.services.router.timings import HttpTimes
from harness.fake_worker import Fault
from tests.services.router.asking import PROMPT, recorded, right, share


async def test_a_request_of_a_pair(cluster):
    prefill, decode = await cluster.pair(step_s=0.01)
    await cluster.ask(PROMPT, max_tokens=5)
    record = await recorded(cluster)
    assert (record.outcome, record.prompt_tokens, record.output_tokens) == ("length", 3, 5)
    assert [(one.prefill_worker, one.decode_worker) for one in record.attempts] == [("p0", "d0")]
    stages = {one.name: one for one in record.stages}
    named = {"wait", "place", "send", "queue", "prefill", "reply", "schedule", "decode.first", "decode"}
    assert named <= set(stages)
    assert stages["prefill"].process.instance == "p0"
    assert stages["decode"].process == ("baton-decode", "d0")
    assert stages["decode"].attributes["tokens"] == 5
    assert stages["schedule"].process == ("baton-scheduler", cluster.server.address)
    assert 0 < stages["schedule"].seconds < stages["place"].seconds
    assert sum(record.first_token_stages.values()) == pytest.approx(record.first_token_s, abs=0.05)
    assert not record.retried
    parents = {start.traceparent for one in (prefill, decode) for start in one.seen.starts}
    assert parents == {record.trace.traceparent}


async def test_a_lost_decode_worker(cluster):
    workers = await cluster.pair(decode=2, step_s=0.005)
    share(workers[1:], Fault(PHASE_DECODE, after_tokens=2, die=True))
    right(await cluster.ask(PROMPT, 30), PROMPT, 30)
    record = await recorded(cluster)
    assert record.retried
    assert [one.trouble for one in record.attempts] == ["lost", ""]
    (event,) = record.events
    lost = record.attempts[0].decode_worker
    assert (event.name, event.attempt, event.attributes["worker"]) == ("failed", 1, lost)
    assert record.attempts[1].decode_worker != lost
    tokens = [one.attributes["tokens"] for one in record.stages if one.name == "decode"]
    assert sum(tokens) == 30
    ways = [one.name for one in record.later if one.attempt == 2]
    assert ways[:2] == ["wait", "place"]


async def test_a_prompt_that_is_recomputed(cluster):
    _, decode = await cluster.pair(step_s=0.005)
    decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_HANDOFF))
    await cluster.ask(PROMPT)
    record = await recorded(cluster)
    assert [one.name for one in record.events] == ["failed", "recomputed"]
    assert (record.events[0].attributes["trouble"], len(record.attempts)) == ("handoff", 1)
    first = next(one for one in record.stages if one.name == "decode.first")
    assert first.begin == record.events[1].at


async def test_a_worker_lost_before_the_first_token(cluster):
    *prefills, _ = await cluster.pair(prefill=2, step_s=0.005)
    share(prefills, Fault(PHASE_PREFILL, failed=Failed.CODE_STALE))
    right(await cluster.ask(PROMPT), PROMPT, 8)
    record = await recorded(cluster)
    assert record.first_token_stages["lost"] > 0
    assert sum(record.first_token_stages.values()) == pytest.approx(record.first_token_s, abs=0.05)
    assert cluster.count("ttft_stage_seconds_count", stage="lost") == 1


async def test_gaps_are_sampled(cluster, monkeypatch):
    monkeypatch.setattr(worker_stream, "GAP_EVERY_S", 0.02)
    await cluster.pair(step_s=0.01)
    await cluster.ask(PROMPT, max_tokens=30)
    samples = cluster.count("itl_stage_seconds_count", stage="engine")
    assert 3 <= samples <= 15  # out of 29 gaps; each sample takes two
    assert cluster.count("itl_stage_seconds_count", stage="wire") == samples
    mean = cluster.count("itl_stage_seconds_sum", stage="engine") / samples
    assert mean >= 0.009  # the engine's step


def kept(name, seconds=1.0):
    state = RequestState(name, f"f-{name}", b"", 3, 8, 64, 1e9, outcome="stop")
    state.http, state.ended, state.response_id = HttpTimes(arrived=1.0), 1.0 + seconds, f"cmpl-{name}"
    return record_of(state)


def names(records):
    return [one.request_id for one in records]


def test_the_slowest_requests_of_the_window():
    now = [0.0]
    recent = Recent(last=1, slowest=2, clock=lambda: now[0])
    recent.add(kept("old", 90.0))
    for number in range(20):
        now[0] += 30.0
        recent.add(kept(f"r{number}", number % 7))
    assert names(recent.slowest())[0] == "old"
    now[0] = WINDOW_S + 61
    assert "old" not in names(recent.slowest())
    assert {one.slowness_s for one in recent.slowest()} == {6.0}
    now[0] *= 3
    assert recent.slowest() == []


def test_records_are_bounded():
    now = [0.0]
    recent = Recent(last=10, slowest=5, clock=lambda: now[0])
    for number in range(3000):
        now[0] += 1.0
        recent.add(kept("r", number % 13))
    assert [record.slowness_s for record in recent.last(3)] == [9.0, 8.0, 7.0]  # the latest first
    assert (len(recent.last()), len(recent.last(0)), len(recent.slowest())) == (10, 0, 5)
    assert sum(len(heap) for _, heap in recent._slow) <= 5 * 16


def test_a_record_is_found_by_either_id():
    recent = Recent(last=1)
    recent.add(kept("slow", 9.0))
    recent.add(kept("r"))
    for known in ("slow", "cmpl-slow"):
        found = recent.find(known)
        assert found.request_id == "slow"
    assert recent.find("nobody") is None
