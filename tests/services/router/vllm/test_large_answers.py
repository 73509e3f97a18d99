import asyncio
import json
import time
from types import SimpleNamespace

import pytest
from fastapi.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.logprobs import Logprob

from baton.services.router.vllm import large_answers

WIDTH = 20


def top_logprobs(*args, **kwargs):
    return OpenAIServingChat._get_top_logprobs(SERVING, *args, **kwargs)


SERVING = SimpleNamespace(
    return_tokens_as_token_ids=False,
    _get_decoded_token=OpenAIServingChat._get_decoded_token,
    _get_top_logprobs=top_logprobs,
)


@pytest.fixture(autouse=True)
def installed():
    large_answers.install()
    large_answers.install()
    token = large_answers._whole.set(False)
    yield
    large_answers._whole.reset(token)


def positions(count):
    return [
        {at + k: Logprob(-0.1 * k, k + 1, f"é{at + k}" if k % 3 else None) for k in range(WIDTH)}
        for at in range(count)
    ]


def chat(count, *, whole, prompt=0):
    large_answers._whole.set(whole)
    choices = []
    for index, length in enumerate((count, 3)):
        logprobs = OpenAIServingChat._create_chat_logprobs(
            SERVING, list(range(length)), positions(length), SimpleNamespace(decode=str), WIDTH, None, False
        )
        message = ChatMessage(role="assistant", content="\u2028ü")
        choices.append(ChatCompletionResponseChoice(index=index, message=message, logprobs=logprobs))
    return ChatCompletionResponse(
        id="a", created=1, model="m", choices=choices, usage=UsageInfo(),
        prompt_logprobs=[None, *positions(prompt)] if prompt else None,
    )  # fmt: skip


def completion(count):
    logprobs = OpenAIServingCompletion._create_completion_logprobs(
        SERVING, list(range(count)), positions(count), WIDTH, SimpleNamespace(decode=str), None, 0, False
    )
    choice = CompletionResponseChoice(
        index=0, text="x", logprobs=logprobs, prompt_logprobs=[None, *positions(count)]
    )
    return CompletionResponse(id="a", created=1, model="m", choices=[choice], usage=UsageInfo())


def as_vllm_sends(answer):
    return bytes(JSONResponse(type(answer).model_dump.__wrapped__(answer)).body)


async def sent(answer):
    """Return the body that a client gets, and the longest turn of the loop until then."""
    messages = []

    async def send(message):
        messages.append(message)

    response = large_answers._Response(content=answer.model_dump())
    sending = asyncio.create_task(response({"type": "http"}, None, send))
    longest = await longest_turn(sending.done)
    await sending
    start, body = messages
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    return body["body"], longest


@pytest.mark.parametrize(("count", "prompt"), [(0, 0), (10, 400), (63, 10), (64, 0), (200, 400)])
async def test_a_chat_is_the_same(count, prompt):
    body, _ = await sent(chat(count, whole=True, prompt=prompt))
    assert json.loads(body) == json.loads(as_vllm_sends(chat(count, whole=False, prompt=prompt)))


@pytest.mark.parametrize("count", [10, 200])
async def test_a_completion_is_the_same(count):
    body, _ = await sent(completion(count))
    assert json.loads(body) == json.loads(as_vllm_sends(completion(count)))


async def test_a_short_answer_takes_vllms_path():
    assert isinstance(chat(10, whole=True).model_dump(), dict)
    assert isinstance(chat(200, whole=True).model_dump(mode="json", exclude={"choices"}), dict)


async def test_a_long_answer_does_not_block_the_loop():
    began = time.thread_time()
    as_vllm_sends(chat(1000, whole=False, prompt=1000))
    at_once = time.thread_time() - began
    for _ in range(3):
        body, longest = await sent(chat(1000, whole=True, prompt=1000))
        assert len(body) > 2_500_000
        if longest < at_once / 5:  # a fiftieth on an idle machine
            return
    raise AssertionError(f"the loop stood still for {longest:.3f} s; all at once takes {at_once:.3f} s")


async def test_a_nan_is_an_error_as_in_vllm():
    answer = completion(200)
    answer.choices[0].logprobs.token_logprobs[100] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        await sent(answer)


async def longest_turn(done):
    """Return the longest iteration of the loop until `done`, in seconds of this thread's CPU time."""
    longest = 0.0
    async with asyncio.timeout(60):
        while not done():
            began = time.thread_time()  # not the clock: another process may have the core in between
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)
    return longest
