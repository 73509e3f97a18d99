from types import SimpleNamespace

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.renderers.chat_utils import MM_PARSER_MAP

from baton.services.router.errors import Unsupported
from baton.services.router.media.parts import MEDIA, images

TEXT = {"type": "text", "text": "What is this?"}
A, B = {"url": "data:a"}, {"url": "data:b", "detail": "low"}


def chat(*parts, kind=ChatCompletionRequest, role="user", **more):
    messages = [{"role": "user", "content": "x"}, {"role": role, "content": [*parts], **more}]
    return kind(model="m", messages=messages)


def found(request, **more):
    return [(one.place, one.url) for one in images(request, **more)]


def test_all_of_vllms_media_are_known():
    text = {"text", "thinking", "input_text", "output_text", "refusal", "tool_reference"}
    assert set(MM_PARSER_MAP) - MEDIA == text


@pytest.mark.parametrize("kind", [ChatCompletionRequest, TokenizeChatRequest])
@pytest.mark.parametrize(
    "of", [{"role": "user"}, {"role": "tool", "tool_call_id": "1"}, {"role": "assistant"}, {"role": "system"}]
)
def test_a_chat(kind, of):
    request = chat(TEXT, {"type": "image_url", "image_url": A}, {"image_url": B["url"]}, kind=kind, **of)
    assert found(request) == [("messages[1].content[1]", "data:a"), ("messages[1].content[2]", "data:b")]


def test_several_chats():
    talk = [{"role": "user", "content": [{"type": "image_url", "image_url": A}]}]
    request = BatchChatCompletionRequest(model="m", messages=[[{"role": "user", "content": "x"}], talk])
    assert found(request) == [("messages[1][0].content[0]", "data:a")]


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"role": "user", "content": "PARTS"}, "input[0].content[0]"),
        ({"type": "message", "role": "user", "content": "PARTS"}, "input[0].content[0]"),
        ({"type": "function_call_output", "call_id": "1", "output": "PARTS"}, "input[0].output[0]"),
        ({"type": "custom_tool_call_output", "call_id": "1", "output": "PARTS"}, "input[0].output[0]"),
    ],
)
def test_a_response(item, place):
    image = {"type": "input_image", "image_url": "data:a", "detail": "auto"}
    item = {name: [image] if value == "PARTS" else value for name, value in item.items()}
    request = ResponsesRequest(model="m", input=[item])
    assert found(request) == [(place, "data:a")]
    assert found(request) == [(place, "data:a")]  # vLLM reads it a second time


def test_messages_of_an_earlier_response():
    earlier = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:a"}]}]
    request = ResponsesRequest(model="m", input="x")
    assert found(request, among={"earlier": earlier}) == [("earlier[0].content[0]", "data:a")]


def test_anthropics_messages():
    stored = {"type": "base64", "media_type": "image/png", "data": "QQ=="}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": stored}]}
    remote = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, remote, result]}]
    request = AnthropicMessagesRequest(model="m", max_tokens=1, messages=messages)
    assert found(request) == [
        ("messages[0].content[1]", "https://example.com/a.png"),
        ("messages[0].content[2].content[0]", "data:image/png;base64,QQ=="),
    ]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio is not served"),
        ({"type": "audio_url", "audio_url": {"url": "http://192.0.2.1/a.wav"}}, "audio is not served"),
        ({"type": "video_url", "video_url": {"url": "http://192.0.2.1/a.mp4"}}, "video is not served"),
        ({"video_url": "http://192.0.2.1/a.mp4"}, "video is not served"),
        ({"type": "file", "file": {"file_id": "f"}}, "files are not served"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "embeddings are not accepted"),
        ({"type": "prompt_embeds", "data": "AAAA"}, "embeddings are not accepted"),
        ({"type": "image_pil", "image_pil": None}, "objects of Python"),
        ({"type": "image_url", "image_url": A, "uuid": "x"}, "'uuid' is not accepted"),
        ({"type": "image_url", "image_url": None, "uuid": "x"}, "'uuid' is not accepted"),
        ({"type": "image_url", "image_url": None}, "has no URL"),
        ({"type": "image_url", "image_url": {"url": ""}}, "has no URL"),
        ({"type": "input_image", "file_id": "f"}, "files are not served"),
        *((part, "has no 'source'") for part in ({"type": "image"}, {"image": "x"})),
        ({"type": "image", "source": "x"}, "has no 'source'"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "'base64' or 'url', not 'file'"),
    ],
)
def test_what_is_refused(part, why):
    request = SimpleNamespace(messages=[{"role": "user", "content": [TEXT, part]}])
    with pytest.raises(Unsupported, match=rf"^messages\[0\]\.content\[1\]: .*{why}"):
        images(request)


def test_text_has_no_images():
    assert found(chat(TEXT, {"type": "text", "text": "image_url"})) == []
    assert found(SimpleNamespace(messages="x", input=[1, 2, 3])) == []
