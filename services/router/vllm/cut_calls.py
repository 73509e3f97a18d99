"""Report that `max_tokens` cut a whole chat answer with tool calls: the last call may be incomplete.

vLLM reports this for streams only, and finishes whole answers with `tool_calls`.

Leans on: vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat.chat_completion_full_generator
(request, result_generator, ...), its ChatCompletionResponse (choices, by index), RequestOutput.outputs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any

from baton.services.router.vllm.stream_errors import handlers

_GENERATE = "chat_completion_full_generator"


def tell_cut_calls(state: Any) -> None:
    """Make the chat handlers in an app's `state` report answers that were cut."""
    for handler in handlers(state):
        if generate := getattr(handler, _GENERATE, None):
            setattr(handler, _GENERATE, _telling(generate))


def _telling(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(generate)
    async def telling(request: Any, results: AsyncIterator[Any], *args: Any, **kwargs: Any) -> Any:
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

    return telling
