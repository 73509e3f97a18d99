from functools import partial
from types import SimpleNamespace

import pytest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import FunctionCall, ToolCall
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from baton.services.router.vllm.messages import adopt_messages


def converted(arguments, finish, stop):
    unused = ("create_messages", "count_tokens", "message_stream_converter")
    handler = SimpleNamespace(**dict.fromkeys(unused, AnthropicServingMessages.create_messages))
    handler.messages_full_converter = partial(AnthropicServingMessages.messages_full_converter, None)
    adopt_messages(SimpleNamespace(anthropic_serving_messages=handler))
    call = ToolCall(id="c", function=FunctionCall(name="look", arguments=arguments))
    message = ChatMessage(role="assistant", content=None, tool_calls=[call])
    choice = ChatCompletionResponseChoice(
        index=0, message=message, finish_reason=finish, stop_reason=stop, logprobs=None
    )
    answer = ChatCompletionResponse(model="m", choices=[choice], usage=UsageInfo())
    return handler.messages_full_converter(answer)


@pytest.mark.parametrize(
    ("arguments", "finish", "stop", "reason", "given"),
    [
        ('{"where": "Paris"}', "tool_calls", None, "tool_use", {"where": "Paris"}),
        ('{"where": "Pa', "length", None, "max_tokens", {}),
        ('{"where": "Pa', "stop", "ris", "stop_sequence", {}),
        ("[1]", "tool_calls", None, "tool_use", {}),
    ],
)
def test_a_call_that_was_cut(arguments, finish, stop, reason, given):
    message = converted(arguments, finish, stop)
    assert message.stop_reason == reason
    assert message.stop_sequence == (stop if reason == "stop_sequence" else None)
    assert (message.content[0].name, message.content[0].input) == ("look", given)
