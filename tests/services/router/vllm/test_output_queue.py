import asyncio
import time

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from baton.services.router.vllm import output_queue
from harness.support import PATIENCE


def output(request_id, *tokens, **more):
    return EngineCoreOutput(request_id=request_id, new_token_ids=list(tokens), **more)


async def test_waiting_tokens_are_merged():
    queue = output_queue.OutputQueue(lambda: 0.0)
    queue.put(output("a", 1))
    queue.put(output("b", 9))
    queue.put(output("a", 2, 3))
    queue.put(output("a", 4, finish_reason=FinishReason.STOP, stop_reason=4))
    first, second = (await queue.take()).outputs
    assert (first.request_id, first.new_token_ids) == ("a", [1, 2, 3, 4])
    assert (first.finish_reason, first.stop_reason) == (FinishReason.STOP, 4)
    assert second.new_token_ids == [9]


@pytest.mark.parametrize("flush_s", [0.0, 60.0])
async def test_logprobs_are_not_merged(flush_s):
    queue = output_queue.OutputQueue(lambda: 0.0, flush_s)
    zeros = np.zeros((1, 1))
    for token in (1, 2):
        queue.put(output("a", token, new_logprobs=LogprobsLists(zeros, zeros, zeros)))
    queue.put(output("a", 3, finish_reason=FinishReason.STOP if flush_s else None))
    async with asyncio.timeout(5 * PATIENCE):
        assert [one.new_token_ids for one in (await queue.take()).outputs] == [[1], [2], [3]]


async def test_take_waits_and_returns_all():
    queue = output_queue.OutputQueue(lambda: 0.0)
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.put(output("a", 1))
    queue.put(output("b", 2))
    assert [one.request_id for one in (await taking).outputs] == ["a", "b"]


async def test_a_late_router_takes_more_at_once():
    late = [1.0]
    queue = output_queue.OutputQueue(lambda: late[0])
    queue.put(output("a", 1))
    taking = asyncio.create_task(queue.take())
    for token in range(2, 5):
        await asyncio.sleep(output_queue.PAUSE_S / 10)
        queue.put(output("a", token))
    late[0] = 0.0
    assert [one.new_token_ids for one in (await taking).outputs] == [[1, 2, 3, 4]]


async def test_waiting_outputs_of_an_aborted_request_are_dropped():
    queue = output_queue.OutputQueue(lambda: 0.0)
    queue.put(output("a", 1))
    queue.put(output("b", 2))
    queue.drop("a")
    assert [one.request_id for one in (await queue.take()).outputs] == ["b"]


async def test_all_but_the_first_and_last_tokens_wait_for_the_flush():
    flush_s = 0.5  # longer than a busy machine stalls
    queue = output_queue.OutputQueue(lambda: 0.0, flush_s)
    queue.put(output("a", 1), at_once=True)
    queue.put(output("b", 9))
    assert [one.new_token_ids for one in (await queue.take()).outputs] == [[1]]
    began = time.monotonic()
    queue.put(output("a", 2))
    queue.put(output("a", 3))
    assert [one.new_token_ids for one in (await queue.take()).outputs] == [[9], [2, 3]]
    assert time.monotonic() - began > flush_s / 2
    queue.put(output("a", 4))
    queue.put(output("b", 10))
    queue.put(output("a", 5, finish_reason=FinishReason.LENGTH))
    (last,) = (await queue.take()).outputs
    assert (last.new_token_ids, last.finish_reason) == ([4, 5], FinishReason.LENGTH)
    queue.drop("b")
    queue.put(output("c", 1), at_once=True)
    assert [one.request_id for one in (await queue.take()).outputs] == ["c"]


def test_events_of_another_host_are_rebased():
    event, kind = EngineCoreEvent, EngineCoreEventType
    events = [event(kind.QUEUED, 100.0), event(kind.SCHEDULED, 101.0)]
    output_queue.rebase(events, -90.0)
    assert [one.timestamp for one in events] == [10.0, 11.0]
    assert output_queue.began_at(events) == (10.0, 11.0)
    assert output_queue.only_preemptions(events) is None
    preempted = event(kind.PREEMPTED, 12.0)
    assert output_queue.only_preemptions([*events, preempted]) == [preempted]
