"""Correct how answers end in vLLM's handlers for chat and Responses.

- A whole chat answer that `max_tokens` cut finishes with `length`, as its stream does, even if it called
  tools: the last call may be incomplete. vLLM says `tool_calls`.
- A response that `max_output_tokens` cut is incomplete, and so is its last item. vLLM says so only in the
  status of whole answers.
- A stream of Responses that fails ends with `response.failed`. vLLM's stream just breaks off.
- The two opening events of a stream of Responses are held until the third, so a refusal before the first
  token becomes an HTTP status, as on other paths.

Leans on: vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat.chat_completion_full_generator
(request, result_generator, ...), its ChatCompletionResponse (choices, by index), RequestOutput.outputs;
vllm.entrypoints.openai.responses.serving.OpenAIServingResponses.{responses_stream_generator,
responses_full_generator, _convert_generation_error_to_streaming_response} and the events of the first:
response.created, response.in_progress, ..., response.output_item.done, response.completed, with the fields
type, sequence_number, item and response; the status of ResponsesResponse and of its items; that an item ends
right before the next item begins, or before the last event.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

from openai.types.responses import ResponseIncompleteEvent
from pydantic import BaseModel
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse

from baton.services.router.vllm.engine_client import RefusedByRouter
from baton.services.router.vllm.error_responses import handlers

log = logging.getLogger(__name__)

_GENERATE = "chat_completion_full_generator"
_OPENING = ("response.created", "response.in_progress")
_COMPLETED = "response.completed"
ENDS = (_COMPLETED, "response.incomplete", "response.failed")  # types of a stream's last event

Events = AsyncGenerator[Any, None]


def tell_cut_calls(state: Any) -> None:
    """Make the chat handlers in an app's `state` report answers that were cut."""
    for handler in handlers(state):
        if generate := getattr(handler, _GENERATE, None):
            setattr(handler, _GENERATE, partial(_telling, generate))


async def _telling(
    generate: Callable[..., Awaitable[Any]],
    request: Any,
    results: AsyncIterator[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    cut: set[int] = set()

    async def watched() -> AsyncIterator[Any]:
        async for result in results:
            cut.update(one.index for one in result.outputs if one.finish_reason == "length")
            yield result

    response = await generate(request, watched(), *args, **kwargs)
    if cut:
        for choice in getattr(response, "choices", ()):
            if choice.index in cut and choice.finish_reason == "tool_calls":
                choice.finish_reason = "length"
    return response


class FailedEvent(BaseModel):
    type: Literal["response.failed"] = "response.failed"
    sequence_number: int
    response: dict[str, Any]


class IncompleteEvent(ResponseIncompleteEvent):
    response: ResponsesResponse


class _StreamFailed(Exception):
    """Carries an error through vLLM's generator, which would send the error's text as an event."""


def adopt_responses(state: Any) -> None:
    """Wrap the Responses handler in an app's `state`, if it has one."""
    handler = getattr(state, "openai_serving_responses", None)
    if handler is None:
        return
    handler._convert_generation_error_to_streaming_response = _raise
    handler.responses_full_generator = partial(_whole, handler.responses_full_generator)
    handler.responses_stream_generator = partial(_streamed, handler.responses_stream_generator)


def failure(error: BaseException) -> dict[str, str]:
    """Return the `error` object of a failed response."""
    refused = isinstance(error, RefusedByRouter) and error.error.status is HTTPStatus.TOO_MANY_REQUESTS
    return {"code": "rate_limit_exceeded" if refused else "server_error", "message": str(error)}


def _raise(error: Exception) -> str:
    raise _StreamFailed from error


async def _whole(generate: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    response = await generate(*args, **kwargs)
    if isinstance(response, ResponsesResponse) and response.status == "incomplete" and response.output:
        _cut(response.output[-1])
    return response


def _cut(item: Any) -> None:
    if hasattr(item, "status"):
        item.status = "incomplete"


async def _streamed(generate: Callable[..., Events], *args: Any, **kwargs: Any) -> Events:
    held: list[Any] = []  # the opening events, or an item's last event
    created: Any = None
    number = -1
    try:
        async for event in generate(*args, **kwargs):
            created, number = created or event, event.sequence_number
            if event.type in _OPENING or event.type == "response.output_item.done":
                if event.type not in _OPENING:
                    for one in held:
                        yield one
                    held = []
                held.append(event)
                continue
            ending = _ending(event, held)
            for one in held:
                yield one
            held = []
            yield ending
    except Exception as error:  # every error must reach the client, which would otherwise wait
        cause = (error.__cause__ or error) if isinstance(error, _StreamFailed) else error
        if not isinstance(cause, RefusedByRouter):
            log.exception("a stream of /v1/responses has failed")
        for one in held:
            yield one
        shown = created.response.model_dump(mode="json", by_alias=True) if created is not None else {}
        response = {**shown, "status": "failed", "error": failure(cause)}
        yield FailedEvent(sequence_number=number + 1, response=response)


def _ending(event: Any, held: list[Any]) -> Any:
    """Return the event. If it ends a cut response, change it and mark the last item as cut."""
    if event.type != _COMPLETED or event.response.status != "incomplete":
        return event
    if held and held[-1].type == "response.output_item.done":
        _cut(held[-1].item)
    return IncompleteEvent(
        type="response.incomplete", sequence_number=event.sequence_number, response=event.response
    )
