"""What is refused of a request before vLLM renders it, and so before it fetches anything for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers.chat_utils import MM_PARSER_MAP

from baton.services.router.vllm.engine_client import RefusedByRouter
from baton.services.router.vllm.request_limits import MEDIA, limit_requests

TEXT = {"text", "thinking", "input_text", "output_text", "refusal", "tool_reference"}
IMAGE = {"image_url": {"url": "http://192.0.2.1/never-fetched.png"}}
PARTS = [
    {"type": "image_url", **IMAGE},
    IMAGE,  # its type is left out
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "http://192.0.2.1/never-fetched.mp4"}},
]


async def asked(request: Any) -> list[Any]:
    """Return the requests that pass. Raises RefusedByRouter."""
    passed: list[Any] = []

    async def check(one: Any) -> None:
        passed.append(one)

    serving = SimpleNamespace(_check_model=check)
    state = State({"openai_serving_chat": serving})
    limit_requests(state)
    await serving._check_model(request)
    return passed


def chat(*parts: Any) -> ChatCompletionRequest:
    content: Any = [{"type": "text", "text": "What is this?"}, *parts]
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": content}])


def test_all_of_vllms_media_are_known() -> None:
    assert set(MM_PARSER_MAP) - MEDIA == TEXT | {"prompt_embeds"}


@pytest.mark.parametrize("part", PARTS)
async def test_media_are_refused_before_anything_is_fetched(part: dict[str, Any]) -> None:
    kind = part.get("type", "image_url")
    with pytest.raises(RefusedByRouter, match=f"a part of type '{kind}': images, audio and video") as refused:
        await asked(chat(part))
    assert refused.value.http_status == 400


async def test_an_image_in_a_response_request() -> None:
    image = {"type": "input_image", "image_url": "http://192.0.2.1/never-fetched.png", "detail": "auto"}
    one = ResponsesRequest(model="m", input=[{"role": "user", "content": [image]}])
    with pytest.raises(RefusedByRouter, match="a part of type 'input_image'"):
        await asked(one)


async def test_text_passes() -> None:
    assert await asked(one := chat({"type": "text", "text": "This."})) == [one]
