"""The first blocks of a prompt are pulled from a decode worker that has them, or computed."""

import pytest

from baton.attempts import prefix_id
from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, PHASE_SAVE, Failed
from baton.scheduler.policy.parts import GUESSED_SPEED
from baton.services.config import SchedulerSettings
from baton.services.router import prefix
from baton.services.router.prefix import between_images
from baton.services.router.vllm.block_hashes import PromptHasher
from harness.fake_worker import BLOCK_SIZE, HASHING, FakeWorker, Fault, until
from harness.router import engine_request
from harness.support import CALL_S
from tests.services.router.asking import right

BLOCKS = 40  # blocks of the prompt, cached at d0
PROMPT = [number % 200 for number in range((BLOCKS + 5) * BLOCK_SIZE)]
HELD = BLOCKS * BLOCK_SIZE
PULLS = "prefix_pulls_total"

assert SchedulerSettings().prefix_pull_s * GUESSED_SPEED < HELD


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(prefix, "PREFIX_WAIT_S", CALL_S)


async def holding(cluster, prefill=1, decode=1):
    """Add workers, and tell the scheduler that d0 has the prompt's first blocks cached."""
    workers = await cluster.pair(prefill, decode)
    for worker in workers:
        worker.patience_s = CALL_S  # like the router's patience
    holds(cluster, "d0", BLOCKS)
    return workers


def holds(cluster, worker_id, blocks):
    keys = PromptHasher(HASHING).keys(engine_request("q", PROMPT, 8)).keys
    prefixes = cluster.server._servicer.prefixes
    prefixes.hear(worker_id, pb.BlockOperations(instance=1, operations=keys[:blocks]))
    prefixes.keep({name: one.role for name, one in cluster.members.workers.items()})


async def pulling(cluster, prefill):
    """Send a request whose prefill pulls the prefix, which is saved, and waits for `go_on`."""
    prefill.faults.append(Fault(PHASE_PREFILL, silent=True))
    asked = len(prefill.seen.starts)
    await cluster.send("q", PROMPT)
    state = cluster.client._relays["q"].state
    await until(lambda: len(prefill.seen.starts) > asked and state.timings.prefix_saved, "the prefill pulls")


async def test_the_prefill_worker_pulls_the_prefix_from_the_decode_worker(cluster):
    prefill, decode = await holding(cluster)
    right(await cluster.ask(PROMPT), PROMPT, 8)
    second, asked = decode.seen.starts  # the decode leg starts first
    assert (asked.phase, asked.prefix_tokens) == (PHASE_SAVE, HELD + 1)
    assert asked.request_id == prefix_id(second.request_id)
    assert (second.phase, second.source.worker_id) == (PHASE_DECODE, "p0")
    [first] = prefill.seen.starts
    source = first.source
    assert (first.phase, source.worker_id, source.address) == (PHASE_PREFILL, "d0", decode.address)
    assert (source.request_id, source.tokens) == (asked.request_id, HELD + 1)
    assert (source.key, second.source.key) == (asked.key, first.key)
    assert asked.key != first.key
    assert asked.epoch == first.epoch == second.epoch == 1
    assert cluster.count(PULLS, outcome="loaded") == 1
    assert cluster.count("prefix_pulled_tokens_total") == HELD + 1
    await cluster.settled()
    assert decode.seen.aborts == []  # the puller has released it


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ({"failed": Failed.CODE_HANDOFF}, "not_cached"),
        ({"failed": Failed.CODE_FULL}, "refused"),
        ({"failed": Failed.CODE_INVALID}, "refused"),
        ({"not_kept": True}, "not_kept"),
        ({"silent": True}, "late"),
    ],
)
async def test_without_the_prefix_the_prompt_is_computed(cluster, fault, outcome):
    prefill, decode = await holding(cluster)
    if outcome == "late":
        prefill.patience_s = 0.2
    decode.faults.append(Fault(PHASE_SAVE, **fault))
    right(await cluster.ask(PROMPT), PROMPT, 8)
    [first] = prefill.seen.starts
    assert first.HasField("source")
    assert cluster.count(PULLS, outcome=outcome) == 1
    assert cluster.count("prefix_pulled_tokens_total") == 0
    assert cluster.count("request_attempts_sum") == 1  # a missing prefix is not a failed attempt
    await cluster.settled()
    assert decode.seen.aborts == ([prefix_id(first.request_id)] if outcome == "late" else [])


async def test_a_source_that_dies_costs_a_moment(cluster):
    _, decode, _ = await holding(cluster, decode=2)
    decode.faults.append(Fault(PHASE_SAVE, die=True))
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert cluster.count(PULLS, outcome="lost") == 1


@pytest.mark.parametrize("code", [Failed.CODE_HANDOFF, Failed.CODE_SOURCE])
async def test_a_prefix_that_cannot_be_loaded_is_computed(cluster, code):
    prefill, decode = await holding(cluster)
    prefill.faults.append(Fault(PHASE_PREFILL, failed=code))
    right(await cluster.ask(PROMPT), PROMPT, 8)
    failed, again = prefill.seen.starts
    assert [(one.epoch, one.HasField("source")) for one in (failed, again)] == [(1, True), (2, False)]
    assert [one.epoch for one in decode.seen.starts if one.phase == PHASE_DECODE] == [1, 2]
    assert prefix_id(failed.request_id) in decode.seen.aborts  # it releases what it saved
    assert cluster.count(PULLS, outcome="failed") == 1
    assert cluster.count("recomputed_prompts_total") == 0
    # The pair is avoided for a while.
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert [start.phase for start in decode.seen.starts].count(PHASE_SAVE) == 1
    assert cluster.count(PULLS, outcome="avoided") == 1


async def test_a_source_that_is_lost_during_the_pull_is_given_up(cluster):
    prefill, decode, _ = await holding(cluster, decode=2)
    await pulling(cluster, prefill)
    await decode.die()
    right(await cluster.answer("q"), PROMPT, 8)
    failed, again = prefill.seen.starts
    assert failed.source.worker_id == "d0"
    assert not again.HasField("source")
    assert cluster.count(PULLS, outcome="failed") == 1


async def test_a_source_that_saved_too_late_may_be_lost(cluster, monkeypatch):
    """By then the prefill worker computes the whole prompt."""
    monkeypatch.setattr(prefix, "PREFIX_WAIT_S", 0.0)
    prefill, source = await holding(cluster)
    source.faults.append(Fault(PHASE_DECODE, silent=True))
    await cluster.send("has the source's room", [1, 2, 3])
    await until(lambda: source.seen.starts and len(prefill.seen.starts) == 1, "it is placed")
    decode = await cluster.members.add(FakeWorker("d1", pb.ROLE_DECODE))
    prefill.patience_s = 0.0
    await pulling(cluster, prefill)
    await until(lambda: decode.seen.starts, "the decode worker waits for the prompt")
    assert [start.phase for start in decode.seen.starts] == [PHASE_DECODE]
    stream = cluster.pool._streams["d0"]
    await source.die()
    await until(lambda: stream.ended, "the router hears of it")
    prefill.go_on()
    right(await cluster.answer("q"), PROMPT, 8)
    assert [start.request_id for start in prefill.seen.starts].count("q") == 1
    assert cluster.count(PULLS, outcome="late") == 1


async def test_a_source_that_is_lost_with_the_decode_worker_costs_one_more_attempt(cluster):
    """One worker was both. The prefill is not repeated for a decode worker that is gone."""
    prefill, decode = await holding(cluster)
    await pulling(cluster, prefill)
    other = await cluster.members.add(FakeWorker("d1", pb.ROLE_DECODE))
    await decode.die()
    right(await cluster.answer("q"), PROMPT, 8)
    assert [start.HasField("source") for start in prefill.seen.starts] == [True, False]
    assert [start.phase for start in other.seen.starts] == [PHASE_DECODE]
    assert cluster.count("retries_total", trouble="unreachable", worker="d0") == 1
    assert cluster.count("retries_total", trouble="prefix", worker="d0") == 0


async def test_an_abort_reaches_the_source(cluster):
    prefill, decode = await holding(cluster)
    await pulling(cluster, prefill)
    await cluster.client.abort_requests_async(["q"])
    name = prefix_id(prefill.seen.starts[0].request_id)
    await until(lambda: name in decode.seen.aborts, "the source has dropped it")


async def test_a_source_may_be_a_decode_worker_other_than_the_request_s(cluster):
    await holding(cluster)
    other = await cluster.members.add(FakeWorker("d1", pb.ROLE_DECODE, step_s=0.0))
    holds(cluster, "d0", BLOCKS)
    asked = 0
    while not other.seen.starts and asked < 20:
        right(await cluster.ask(PROMPT), PROMPT, 8)
        asked += 1
    assert [start.phase for start in other.seen.starts] == [PHASE_DECODE]
    assert cluster.count(PULLS, outcome="loaded") == asked
    assert cluster.count("ttft_stage_seconds_count", stage="fetch") == asked


@pytest.mark.parametrize(
    ("cached", "places", "tokens"),
    [
        (640, [], 641),
        (640, [range(700, 900)], 641),
        (640, [range(500, 640)], 641),
        (640, [range(500, 641)], 500),  # its last token would be computed
        (640, [range(500, 700)], 500),
        (640, [range(200, 500), range(500, 700)], 200),  # one follows the other
        (640, [range(200, 449), range(500, 700)], 200),  # in one block
        (640, [range(200, 448), range(500, 700)], 500),
        (640, [range(0, 700)], 0),
    ],
)
def test_a_prefix_ends_in_a_block_without_images(cached, places, tokens):
    assert between_images(cached + 1, cached, places) == tokens
