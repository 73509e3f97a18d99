"""The router's small parts, each alone."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from baton.services.router.errors import NotAdmitted, Overloaded, TimedOut, Why
from baton.services.router.http.admission import AdmissionMiddleware, current_admission
from baton.services.router.journal import GROWTH, Journal
from baton.services.router.prefix import MAX_BLOCKS, prefix_hashes
from baton.services.router.recovery import (
    BACKOFF_S,
    MOST_BACKOFF_S,
    SHORT_PROMPT_TOKENS,
    Failure,
    RecoveryStep,
    Trouble,
    backoff_s,
    next_step,
)
from baton.services.router.state import LOGPROB_BYTES, ROOM_TOKENS, RequestState
from baton.services.router.vllm import outputs
from baton.services.router.vllm.engine_client import RefusedByRouter, RelayClient, without_reserved
from harness.router import Cluster, engine_request


def output(request_id: str, *tokens: int, **more: Any) -> Any:
    return EngineCoreOutput(request_id=request_id, new_token_ids=list(tokens), **more)


# -- the queue to the front end


async def test_tokens_that_wait_are_merged() -> None:
    queue = outputs.OutputQueue(lambda: 0.0)
    queue.put(output("a", 1))
    queue.put(output("b", 9))
    queue.put(output("a", 2, 3))
    queue.put(output("a", 4, finish_reason=FinishReason.STOP, stop_reason=4))
    first, second = (await queue.take()).outputs
    assert (first.request_id, first.new_token_ids, first.finish_reason) == (
        "a",
        [1, 2, 3, 4],
        FinishReason.STOP,
    )
    assert first.stop_reason == 4
    assert second.new_token_ids == [9]


async def test_logprobs_are_not_merged() -> None:
    queue = outputs.OutputQueue(lambda: 0.0)
    zeros = np.zeros((1, 1))
    for token in (1, 2):
        queue.put(output("a", token, new_logprobs=LogprobsLists(zeros, zeros, zeros)))
    queue.put(output("a", 3))
    assert [one.new_token_ids for one in (await queue.take()).outputs] == [[1], [2], [3]]


async def test_take_waits_and_takes_all() -> None:
    queue = outputs.OutputQueue(lambda: 0.0)
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.put(output("a", 1))
    queue.put(output("b", 2))
    assert [one.request_id for one in (await taking).outputs] == ["a", "b"]


async def test_a_router_that_is_late_takes_more_at_once() -> None:
    late = [1.0]
    queue = outputs.OutputQueue(lambda: late[0])
    queue.put(output("a", 1))
    taking = asyncio.create_task(queue.take())
    for token in range(2, 5):
        await asyncio.sleep(outputs.PAUSE_S / 10)
        queue.put(output("a", token))
    late[0] = 0.0
    assert [one.new_token_ids for one in (await taking).outputs] == [[1, 2, 3, 4]]


async def test_what_waits_for_an_aborted_request_is_dropped() -> None:
    queue = outputs.OutputQueue(lambda: 0.0)
    queue.put(output("a", 1))
    queue.put(output("b", 2))
    queue.drop("a")
    assert [one.request_id for one in (await queue.take()).outputs] == ["b"]


def test_times_of_another_host() -> None:
    def event(kind: EngineCoreEventType, at: float) -> EngineCoreEvent:
        return EngineCoreEvent(kind, at)

    events = [event(EngineCoreEventType.QUEUED, 100.0), event(EngineCoreEventType.SCHEDULED, 101.0)]
    outputs.rebase(events, -90.0)
    assert [one.timestamp for one in events] == [10.0, 11.0]
    assert outputs.scheduled_at(events) == 11.0
    assert outputs.only_preemptions(events) is None
    preempted = event(EngineCoreEventType.PREEMPTED, 12.0)
    assert outputs.only_preemptions([*events, preempted]) == [preempted]


# -- what to do when a part fails


@pytest.mark.parametrize(
    ("trouble", "failures_left", "tokens", "step"),
    [
        (Trouble.LOST, 2, 10, RecoveryStep.PLACE_AGAIN),
        (Trouble.LOST, 0, 10, RecoveryStep.GIVE_UP),
        (Trouble.INVALID, 2, 10, RecoveryStep.GIVE_UP),
        (Trouble.HANDOFF, 2, SHORT_PROMPT_TOKENS, RecoveryStep.COMPUTE_HERE),
        (Trouble.HANDOFF, 2, SHORT_PROMPT_TOKENS + 1, RecoveryStep.PLACE_AGAIN),
        (Trouble.HANDOFF, 0, 10**6, RecoveryStep.COMPUTE_HERE),
        (Trouble.NOT_KEPT, 0, 10**6, RecoveryStep.COMPUTE_HERE),
        (Trouble.REFUSED, 0, 10**6, RecoveryStep.PLACE_AGAIN),  # it had not begun
        (Trouble.UNREACHABLE, 0, 10**6, RecoveryStep.PLACE_AGAIN),
    ],
)
def test_next_step(trouble: Trouble, failures_left: int, tokens: int, step: RecoveryStep) -> None:
    failure = Failure(trouble, "w", "")
    assert next_step(failure, failures_left=failures_left, tokens_to_prefill=tokens) is step


def test_backoff_doubles_up_to_a_limit() -> None:
    assert backoff_s(0) == backoff_s(1) == 0
    waits = [backoff_s(retries) for retries in range(2, 30)]
    assert 0.75 * BACKOFF_S <= waits[0] <= 1.25 * BACKOFF_S
    assert all(wait <= 1.25 * MOST_BACKOFF_S for wait in waits)
    assert waits[-1] >= 0.75 * MOST_BACKOFF_S
    assert sum(waits[:4]) < MOST_BACKOFF_S


# -- the journal


def request_state(name: str, prompt: int = 100, max_tokens: int = 1000) -> RequestState:
    return RequestState(
        request_id=name,
        frontend_id=name,
        engine_request=bytes(prompt),
        prompt_tokens=prompt,
        max_tokens=max_tokens,
        max_model_len=2048,
        deadline=0.0,
    )


def test_the_journal_is_bounded_in_bytes() -> None:
    each = request_state("a").journal_bytes
    journal = Journal(3 * each)
    states = [request_state(str(number)) for number in range(4)]
    for state in states[:3]:
        journal.enter(state)
    assert (len(journal), journal.size) == (3, 3 * each)
    with pytest.raises(NotAdmitted, match="journal_mib") as full:
        journal.enter(states[3])
    with pytest.raises(NotAdmitted, match="journal_mib"):
        journal.check_room()  # as before a request is rendered
    assert (full.value.status, full.value.never) == (503, False)
    assert full.value.retry_after_s > 0
    journal.leave(states[0])
    journal.leave(states[0])
    journal.enter(states[3])
    for state in states:
        journal.leave(state)
    assert (len(journal), journal.size) == (0, 0)


def test_what_never_fits_into_the_journal_is_refused_for_good() -> None:
    journal = Journal(request_state("a").journal_bytes)
    with pytest.raises(NotAdmitted) as refused:
        journal.enter(request_state("b", prompt=101))
    assert (refused.value.status, refused.value.never, journal.size) == (400, True, 0)


def test_a_request_stays_within_its_place_in_the_journal() -> None:
    state = request_state("a", max_tokens=1900)
    journal = Journal()
    journal.enter(state)
    for token in range(1900):
        state.tokens.append(token)
        if state.outgrown:
            journal.grow(state)
        held = sys.getsizeof(state.tokens) + sys.getsizeof(state.engine_request)
        assert held < journal.size == state.journal_bytes
    journal.leave(state)
    assert journal.size == 0


def test_a_long_model_does_not_fill_the_journal_before_anything_is_written() -> None:
    """Clients seldom say how long an answer may be: the model's whole length is allowed then."""
    journal = Journal(1 << 20)
    for number in range(100):
        journal.enter(replace(request_state(str(number), max_tokens=131_072), max_model_len=131_072))


def test_log_probabilities_are_counted() -> None:
    plain, asked = request_state("a"), replace(request_state("b"), logprobs=21)
    assert asked.journal_bytes - plain.journal_bytes == 21 * ROOM_TOKENS * LOGPROB_BYTES
    asked = replace(request_state("b"), prompt_logprobs=3)
    assert asked.journal_bytes - plain.journal_bytes == 3 * 100 * LOGPROB_BYTES


def test_the_journal_is_bounded_while_answers_grow() -> None:
    states = [request_state(str(number), max_tokens=1900) for number in range(3)]
    journal = Journal(3 * states[0].journal_bytes)
    for state in states:
        journal.enter(state)

    def write(tokens: int) -> None:
        for state in states:
            state.tokens.extend(range(tokens))
            if state.outgrown:
                journal.grow(state)
            assert journal.size <= GROWTH * journal.limit

    write(300)
    assert journal.size > journal.limit  # they go on
    with pytest.raises(Overloaded, match="journal_mib"):
        write(1500)
    with pytest.raises(NotAdmitted):
        journal.enter(request_state("late"))


# -- prefixes


def test_prefix_hashes() -> None:
    tokens = list(range(100))
    hashes = prefix_hashes(tokens, 16)
    assert len(hashes) == 6  # full blocks alone
    assert prefix_hashes([*tokens, 7, 8, 9], 16) == hashes
    other = prefix_hashes([*tokens[:50], 0, *tokens[51:]], 16)
    assert (other[:3], other[3:] == hashes[3:]) == (hashes[:3], False)
    assert prefix_hashes(tokens, 16, salt="x")[0] != hashes[0]
    assert len(prefix_hashes([1] * 100_000, 16)) == MAX_BLOCKS
    assert prefix_hashes([1] * 15, 16) == ()


# -- the response that waits


async def respond(*messages: dict[str, Any], error: Exception | None = None, at: int = 0) -> list[Any]:
    """What a client gets when the app sends `messages` and the request fails before the one at index `at`."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for index, message in enumerate(messages):
            if error is not None and index == at:
                admission = current_admission.get()
                assert admission is not None
                admission.refuse(error)  # type: ignore[arg-type]
            await send(message)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody asks")

    await AdmissionMiddleware(app)({"type": "http", "method": "POST", "headers": []}, receive, send)
    return sent


START = {"type": "http.response.start", "status": 200, "headers": []}
CHUNK = {"type": "http.response.body", "body": b"data: x\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}


async def test_a_response_passes_unchanged() -> None:
    assert await respond(START, CHUNK, CHUNK, END) == [START, CHUNK, CHUNK, END]


async def test_a_refusal_before_the_first_chunk_replaces_the_response() -> None:
    start, body = await respond(START, CHUNK, CHUNK, END, error=NotAdmitted("no room", Why.FULL, 1.2), at=1)
    assert start["status"] == 503
    assert (b"retry-after", b"2") in start["headers"]
    assert json.loads(body["body"])["error"] == {
        "message": "no room",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
    assert not body["more_body"]


async def test_after_the_first_chunk_it_is_too_late() -> None:
    assert await respond(START, CHUNK, CHUNK, END, error=TimedOut("late"), at=2) == [START, CHUNK, CHUNK, END]


async def test_what_never_fits_is_400() -> None:
    start, _ = await respond(START, CHUNK, error=NotAdmitted("too large", Why.TOO_LARGE))
    assert start["status"] == 400
    assert all(name != b"retry-after" for name, _ in start["headers"])


# -- the engine client


@pytest.mark.parametrize(
    "name", ["sleep_async", "reset_prefix_cache_async", "collective_rpc_async", "add_lora_async"]
)
async def test_administration_is_refused_clearly(cluster: Cluster, name: str) -> None:
    with pytest.raises(RefusedByRouter, match="not offered by the router"):
        await getattr(cluster.client, name)()


def test_every_call_of_the_engine_client_is_there_or_refused() -> None:
    """A new vLLM may ask for more: it must not fall back to a bare NotImplementedError."""
    from vllm.v1.engine.core_client import EngineCoreClient

    asked = [name for name in vars(EngineCoreClient) if name.endswith("_async")]
    assert [name for name in asked if name not in vars(RelayClient)] == []


@pytest.mark.parametrize(
    "change",
    [
        {"mm_features": [1]},
        {"lora_request": 1},
        {"resumable": True},
        {"prompt_embeds": 1},
        {"sampling_params": None},
    ],
)
async def test_what_is_not_served(cluster: Cluster, change: dict[str, Any]) -> None:
    request = engine_request("q", [1], 4)
    for key, value in change.items():
        setattr(request, key, value)
    with pytest.raises(RefusedByRouter, match="served here") as refused:
        await cluster.client.add_request_async(request)
    assert refused.value.http_status == 400


def test_without_reserved() -> None:
    mine = {"kv_transfer_params": {}, "ec_transfer_params": {}, "baton_x": 1}
    assert without_reserved({**mine, "a": 1}) == {"a": 1}
    assert without_reserved(mine) is None
    assert without_reserved(None) is None
