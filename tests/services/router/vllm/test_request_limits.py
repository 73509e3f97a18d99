from types import SimpleNamespace

import pytest
from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from baton.services.router.vllm.engine_client import RefusedByRouter
from baton.services.router.vllm.request_limits import MAX_CHARACTERS, MAX_TOOLS, field_problem, limit_requests

USER = {"role": "user", "content": "x"}


async def asked(request):
    """Return the requests that pass. Raises RefusedByRouter."""
    passed = []

    async def check(one):
        passed.append(one)

    serving = SimpleNamespace(_check_model=check)
    limit_requests(State({"openai_serving_chat": serving}))
    await serving._check_model(request)
    return passed


def chat(*parts):
    content = [{"type": "text", "text": "What is this?"}, *parts]
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (CompletionRequest(model="m", prompt=["x"] * 100, n=3), "asks for 300 answers; 256 are allowed"),
        (CompletionRequest(model="m", prompt=[[1]] * 300), "asks for 300 answers"),
        (ChatCompletionRequest(model="m", messages=[USER], n=1000), "asks for 1000 answers"),
        (BatchChatCompletionRequest(model="m", messages=[[USER]] * 300), "asks for 300 answers"),
        (
            ChatCompletionRequest(model="m", messages=[USER], structured_outputs={"regex": "x" * 200_000}),
            "131072",
        ),
    ],
)
async def test_too_many_answers_and_huge_grammars_are_refused(request_, problem):
    with pytest.raises(RefusedByRouter, match=problem) as refused:
        await asked(request_)
    assert refused.value.http_status == 400


async def test_text_passes():
    assert await asked(one := chat({"type": "text", "text": "This."})) == [one]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"bad_words": ["word " * 12_000] * 100}, "bad_words has 6000000 characters; 16384 are allowed"),
        ({"stop": "x" * 20_000}, "stop has 20000 characters"),
        ({"stop": ["x" * 10_000] * 2}, "stop has 20000 characters"),
        ({"query": "x" * 70_000, "items": []}, "query has 70000 characters"),
        ({"items": ["x" * 700] * 100}, "items has 70000 characters"),
        ({"cache_salt": "x" * 5_000}, "cache_salt has 5000 characters"),
        ({"tools": [{}] * 513}, "tools has 513 entries; 512 are allowed"),
        ({"items": [[1] * 70_000]}, ""),
        ({"bad_words": ["word"] * 128, "stop": None, "tools": [{}] * MAX_TOOLS}, ""),
        ({name: "x" * size for name, size in MAX_CHARACTERS.items()}, ""),
        ({}, ""),
    ],
)
def test_fields_that_are_too_long_are_refused(fields, problem):
    found = field_problem(SimpleNamespace(**fields))
    assert found.startswith(problem)
    assert bool(found) == bool(problem)
