"""Correct vLLM's handler of Anthropic's Messages: images, refusals, errors in streams, cut tool calls.

vLLM's handler logs every exception with a traceback, even a refusal. It cannot read an error in the chat's
stream, and it parses the arguments of tool calls that `max_tokens` cut. Images are admitted before the
handler converts the request, so that errors name them as the client does.

Leans on: vllm.entrypoints.anthropic.serving.AnthropicServingMessages.{create_messages, count_tokens,
message_stream_converter, messages_full_converter}, which its routes look up on app.state's object; that its
stream's chunks are OpenAI's `data: ...` lines; create_error_response for an exception's status.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import jinja2
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError

from baton.services.router.http.admission import current_admission
from baton.services.router.http.forms import anthropic_error
from baton.services.router.media.door import MediaDoor
from baton.services.router.vllm.error_responses import UNFORESEEN, unforeseen_error
from baton.services.router.vllm.images import admit_images

# Exceptions that vLLM's apps turn into a response without logging them.
FORESEEN = (VLLMError, ValueError, TypeError, OverflowError, NotImplementedError, jinja2.TemplateError)
_DATA = "data: "
_ERROR = 'data: {"error"'


def adopt_messages(state: Any, media: MediaDoor | None = None) -> None:
    """Wrap the Messages handler in an app's `state`, if it has one. `media` admits images."""
    handler = getattr(state, "anthropic_serving_messages", None)
    if handler is None:
        return
    handler.create_messages = partial(_answering, handler.create_messages, media)
    handler.count_tokens = partial(_answering, handler.count_tokens, media)
    handler.message_stream_converter = partial(_converted, handler.message_stream_converter)
    handler.messages_full_converter = partial(_whole, handler.messages_full_converter)


async def _answering(
    call: Callable[..., Awaitable[Any]], media: MediaDoor | None, request: Any, *args: Any, **kwargs: Any
) -> Any:
    try:
        await admit_images(request, media)
        return await call(request, *args, **kwargs)
    except FORESEEN as error:
        return create_error_response(error)
    except UNFORESEEN as error:
        return unforeseen_error(error)


async def _converted(
    convert: Callable[[Any], AsyncGenerator[str, None]], chunks: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    failure: dict[str, Any] = {}

    async def whole() -> AsyncGenerator[str, None]:
        async for chunk in chunks:
            if chunk.startswith(_ERROR):
                failure.update(json.loads(chunk.removeprefix(_DATA))["error"])
                await chunks.aclose()
                return
            yield chunk

    async for event in convert(whole()):
        yield event
    if failure:
        admission = current_admission.get()
        known = admission.error if admission is not None else None
        status = known.status if known is not None else HTTPStatus.INTERNAL_SERVER_ERROR
        yield f"event: error\ndata: {json.dumps(anthropic_error(status, failure['message']))}\n\n"


def _whole(convert: Callable[[Any], Any], answer: Any) -> AnthropicMessagesResponse:
    cut = False
    choice = answer.choices[0]
    for call in choice.message.tool_calls or ():
        if not _is_object(call.function.arguments):
            cut = True
            call.function.arguments = "{}"
    converted: AnthropicMessagesResponse = convert(answer)
    if cut and converted.stop_reason == "tool_use" and isinstance(choice.stop_reason, str):
        converted.stop_reason, converted.stop_sequence = "stop_sequence", choice.stop_reason
    return converted


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
