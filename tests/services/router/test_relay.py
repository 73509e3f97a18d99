"""A request over real gRPC from its placement to its end."""

import asyncio
import contextvars
import gc
import weakref

import pytest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, Failed
from baton.scheduler.policy import Policy
from baton.services import logs
from baton.services.router import worker_stream
from baton.services.router.record import usage_of
from baton.services.router.relay import Relay
from baton.services.router.vllm.engine_client import RefusedByRouter
from harness.fake_worker import BLOCK_SIZE, EOS, FakeWorker, Fault, answer, until
from tests.services.router.asking import PROMPT, booked, refused, right, share


async def test_prefill_then_decode(cluster):
    prefill, decode = await cluster.pair()
    right(await cluster.ask(PROMPT), PROMPT, 8)
    [first], [second] = prefill.seen.starts, decode.seen.starts
    assert (first.phase, list(first.output_token_ids), first.HasField("source")) == (PHASE_PREFILL, [], False)
    assert (second.phase, list(second.output_token_ids)) == (PHASE_DECODE, [])
    source = second.source
    assert (source.worker_id, source.address) == (prefill.worker_id, prefill.address)
    assert (source.request_id, source.tokens) == (first.request_id, len(PROMPT))
    assert len(source.key) == 16
    assert (source.key, second.key) == (first.key, b"")
    assert second.epoch == first.epoch == 1
    assert second.engine_request == first.engine_request
    assert (first.prompt_tokens, first.blocks) == (len(PROMPT), 0)
    assert (second.prompt_tokens, second.blocks) == (0, 1)
    await cluster.settled()
    assert prefill.seen.aborts == decode.seen.aborts == []
    [handoff] = (await cluster.scheduler.describe()).handoffs
    assert (handoff.outcome, handoff.cost.output_tokens) == ("length", 8)
    assert handoff.cost.transport == "shm"
    assert handoff.cost.decode_ms >= 0 < handoff.cost.prefill_ms


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("aborted", [False, True])
async def test_nothing_of_an_ended_request_waits_for_the_garbage_collector(cluster, aborted):
    """Its memory is freed when it ends, as the journal assumes."""
    await cluster.pair(step_s=0.05)
    await cluster.send("q", PROMPT)
    await until(lambda: cluster.got["q"].tokens, "the first token is there")
    [relay] = [weakref.ref(one) for one in gc.get_objects() if isinstance(one, Relay)]
    if aborted:
        await cluster.client.abort_requests_async(["q"])
    await until(lambda: cluster.client.live == 0, "it has ended")
    await until(lambda: relay() is None, "it is gone")


async def test_shared_blocks_are_not_booked_twice(cluster):
    _, decode = await cluster.pair()
    decode.shares = 5
    prompt = [1] * 10 * BLOCK_SIZE
    decode.faults.append(Fault(PHASE_DECODE, 2, silent=True))

    await cluster.send("q", prompt, 20)
    await until(lambda: len(cluster.got["q"].tokens) == 3, "it writes")
    whole = -(-(len(prompt) + 20 + 1) // BLOCK_SIZE)  # plus one lookahead token
    await booked(cluster, "d0", blocks=whole - 5)


@pytest.mark.parametrize(("max_tokens", "eos_at", "reason"), [(1, None, "length"), (9, 0, "stop")])
async def test_a_request_that_ends_with_its_first_token_ends_there(cluster, max_tokens, eos_at, reason):
    """If this is known in advance, no decode worker is asked."""
    prefill, decode = await cluster.pair()
    prefill.eos_at = eos_at
    got = await cluster.ask(PROMPT, max_tokens)
    assert (got.reason, got.tokens) == (reason, [EOS] if eos_at == 0 else answer(PROMPT, 1))
    await cluster.settled()
    asked = [start.request_id for start in decode.seen.starts]
    assert len(asked) == (max_tokens > 1)
    await until(lambda: decode.seen.aborts == asked, "it is told to wait no longer")
    assert decode.running == []
    await until(lambda: prefill.seen.aborts, "the KV that nobody wants is dropped")


async def test_a_late_message_slows_the_router_for_a_moment(cluster):
    """Outputs are merged only while the router is behind."""
    _, decode = await cluster.pair()
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert cluster.pool.lag_s() < 0.4
    decode.late_s = 0.5
    await cluster.send("late", PROMPT)
    await until(lambda: cluster.pool.lag_s() > 0.4, "it is read late")
    right(await cluster.answer("late"), PROMPT, 8)
    await until(lambda: cluster.pool.lag_s() == 0, "nothing comes late any more", 1)


@pytest.mark.parametrize("begun", [False, True], ids=["before its task runs", "while it is placed"])
async def test_an_early_abort_books_nothing(cluster, begun):
    await cluster.pair()
    await cluster.send("q", PROMPT, 1000)
    if begun:
        await asyncio.sleep(0)  # its task waits for a placement
    await cluster.client.abort_requests_async(["q"])
    await cluster.settled()


async def test_workers_learn_how_long_a_request_has_left(cluster):
    cluster.remake(max_attempts=3, request_timeout_s=0.2)
    prefill, decode = await cluster.pair()
    decode.faults.append(Fault(PHASE_DECODE, 2, silent=True))
    assert refused(await cluster.ask(PROMPT, 50), "longer than 0.2 s", answer(PROMPT, 3)) == 504
    await until(lambda: prefill.seen.aborts and decode.seen.aborts, "both are told")
    assert all(0 < start.left_s <= 0.2 for start in (*prefill.seen.starts, *decode.seen.starts))


async def test_late_outputs_of_an_aborted_request_are_dropped(cluster):
    _, decode = await cluster.pair()
    decode.before_step = lambda: cluster.client.abort(["q"])  # the step's tokens are sent after it
    await cluster.send("q", PROMPT, 1000)
    await cluster.settled()
    seen = len(cluster.got["q"].tokens)
    right(await cluster.ask([9], 5), [9], 5)
    assert len(cluster.got["q"].tokens) == seen <= 1


async def test_too_large_for_any_worker(cluster):
    await cluster.pair()
    assert refused(await cluster.ask([1] * 5000), "longer than the model's limit") == 400


async def test_the_policy_sees_the_prompt_s_prefixes_with_and_without_a_scheduler(cluster, monkeypatch):
    needs = []
    choose = Policy.choose

    def recorded(policy, view, asked):
        needs.append(asked)
        return choose(policy, view, asked)

    monkeypatch.setattr(Policy, "choose", recorded)
    await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    prompt = list(range(2 * BLOCK_SIZE))
    right(await cluster.ask(prompt), prompt, 8)
    await cluster.scheduler.refresh()
    await cluster.lose_scheduler()
    right(await cluster.ask(prompt), prompt, 8)
    asked = {(one.attempt.request_id, one.prefix.tokens, len(one.prefix.keys)) for one in needs}
    assert asked == {("q0", BLOCK_SIZE, 2), ("q1", BLOCK_SIZE, 2)}
    assert len({one.prefix.keys for one in needs}) == 1


async def test_lines_of_a_stream_are_not_of_the_request_that_opened_it(cluster, caplog):
    """The stream must not keep that request's context variables either."""
    mixed = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    seen = []
    ended = cluster.pool._ended

    def noted(*args):
        seen.append(contextvars.copy_context().get(logs._concerns))
        ended(*args)

    cluster.pool._ended = noted
    logs.concern(request_id="opens")
    right(await cluster.ask(PROMPT), PROMPT, 8)
    await mixed.die()
    await until(lambda: seen, "the stream has ended")
    assert seen == [None]


async def test_kv_that_waits_to_be_pulled_keeps_its_stream_open(cluster, monkeypatch):
    """A worker frees saved KV when the router's stream ends."""
    monkeypatch.setattr(worker_stream, "IDLE_CLOSE_S", 0.05)
    prefill, decode = await cluster.pair()
    decode.faults.append(Fault(PHASE_DECODE, silent=True))  # it waits for a slot
    asking = asyncio.create_task(cluster.ask(PROMPT, 20))
    await until(lambda: decode.seen.starts, "the decode worker is told")
    idle = await cluster.members.add(FakeWorker("idle", pb.ROLE_DECODE))
    await cluster.connect(idle)
    await until(lambda: cluster.pool.opened(idle.worker_id) is None, "one that nobody needs is closed")
    assert cluster.pool.opened(prefill.worker_id) is not None
    decode.go_on()
    right(await asking, PROMPT, 20)
    await until(lambda: cluster.pool.opened(prefill.worker_id) is None, "it is closed")


async def test_an_idle_worker_stays_connected(cluster):
    cluster.remake(silence_s=0.2)
    await cluster.pair()
    right(await cluster.ask(PROMPT), PROMPT, 8)
    streams = dict(cluster.pool._streams)
    await asyncio.sleep(0.6)
    assert cluster.pool._streams == streams
    assert not cluster.pool.suspects()


async def test_a_full_journal_refuses_early(cluster):
    cluster.remake(journal=7000)
    prefill, decode = await cluster.pair(step_s=0.01)
    await cluster.send("first", PROMPT, 50)
    with pytest.raises(RefusedByRouter, match="journal is full") as full:
        await cluster.send("second", PROMPT, 50)
    assert full.value.http_status == 503
    right(await cluster.answer("first"), PROMPT, 50)
    await cluster.settled()
    right(await cluster.ask(PROMPT, 50), PROMPT, 50)
    with pytest.raises(RefusedByRouter) as never:
        await cluster.send("large", PROMPT, 50, prompt_logprobs=5)
    assert never.value.http_status == 400
    assert len(prefill.seen.starts) == len(decode.seen.starts) == 2


async def test_usage_is_of_all_attempts(cluster):
    *_, first, second = await cluster.pair(decode=2, step_s=0.002)
    share((first, second), Fault(PHASE_DECODE, 5, failed=Failed.CODE_STALE))
    for worker in (first, second):
        worker.speculative_method = "mtp"
        worker.drafts = RequestSpecDecodeMetrics(num_spec_tokens=2, histogram=[4, 3, 2], num_draft_tokens=18)
    await cluster.send("q", PROMPT, 20)
    state = cluster.client._relays["q"].state
    right(await cluster.answer("q"), PROMPT, 20)
    used = usage_of([state])
    assert (used["draft_steps"], used["drafted_tokens"], used["accepted_tokens"]) == (18, 36, 14)
    assert used["acceptance_by_position"] == [round(10 / 18, 4), round(4 / 18, 4)]
    assert (sorted(used["decode_worker"].split(", ")), used["attempts"]) == (["d0", "d1"], 2)
    assert used["decode_ms"] > 30  # 20 steps of 2 ms, over both workers


async def test_reserved_arguments_are_stripped(cluster):
    prefill, _ = await cluster.pair()
    mine = {"kv_transfer_params": {"do_remote_prefill": True}, "baton_generated": 3, "ec_transfer_params": {}}
    await cluster.ask(PROMPT, extra_args={**mine, "session_id": "s"})
    await cluster.ask(PROMPT, extra_args=mine)
    assert prefill.seen.extra_args == [{"session_id": "s"}, None]


async def test_a_client_s_strange_id_does_not_travel(cluster):
    prefill, _ = await cluster.pair()
    name = "{x}:*\n" + "a" * 500
    await cluster.send(name, PROMPT)
    right(await cluster.answer(name), PROMPT, 8)
    travelled = prefill.seen.starts[0].request_id
    assert travelled.isascii()
    assert len(travelled) < 64
