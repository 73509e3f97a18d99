"""vLLM gets the images that were admitted, under the names that it would give them, and no other media."""

import asyncio
from types import SimpleNamespace

import pytest
from starlette.datastructures import State
from vllm import envs
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.multimodal.media.image import ImageMediaIO

from baton.services.config import MediaSettings
from baton.services.errors import StartError
from baton.services.router.http.admission import Admission, current_admission
from baton.services.router.media.door import MediaDoor
from baton.services.router.vllm.engine_client import RefusedByRouter
from baton.services.router.vllm.images import drop_images, use_admitted_images
from baton.services.router.vllm.messages import adopt_messages
from baton.services.router.vllm.request_limits import limit_requests
from harness.fake_worker import until
from harness.pictures import data_url, picture, saved

FILES = {"plain": saved(picture()), "with alpha": saved(picture("RGBA").rotate(20))}


@pytest.fixture
async def door():
    async with MediaDoor(MediaSettings(), 1 << 20) as one:
        yield one


@pytest.fixture(autouse=True)
def connector(monkeypatch):
    monkeypatch.setattr(envs, "VLLM_MEDIA_CONNECTOR", "http", raising=False)
    use_admitted_images(SimpleNamespace(multimodal_config=None))
    return MEDIA_CONNECTOR_REGISTRY.load(envs.VLLM_MEDIA_CONNECTOR)


@pytest.fixture
def admission():
    one = Admission()
    token = current_admission.set(one)
    yield one
    current_admission.reset(token)


def chat(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": parts}])


async def checked(request, door, **handler):
    async def check(_):
        return None

    serving = SimpleNamespace(_check_model=check, **handler)
    limit_requests(State({"serving": serving}), door)
    await serving._check_model(request)


@pytest.mark.parametrize("name", FILES)
async def test_images_have_vllms_names(name, door, connector, admission):
    url = data_url(FILES[name])
    await checked(chat(url), door)
    ours, theirs = await connector.fetch_image_async(url), ImageMediaIO().load_bytes(FILES[name])
    names = [MultiModalHasher.hash_kwargs("blake3", model_id="m", image=one) for one in (ours, theirs)]
    assert names[0] == names[1]
    assert ours.media.tobytes() == theirs.media.tobytes()
    drop_images()
    with pytest.raises(RefusedByRouter, match="where none is served"):
        await connector.fetch_image_async(url)


@pytest.mark.usefixtures("no_garbage_collection")
async def test_a_refused_request_keeps_no_pixels(door, admission):
    with pytest.raises(RefusedByRouter, match="cannot be read"):
        await checked(chat(data_url(FILES["plain"]), data_url(FILES["with alpha"][:-400])), door)
    await until(lambda: door.pixels == 0, "nothing is held")


async def test_requests_do_not_see_each_others_images(door, connector):
    url = data_url(FILES["plain"])

    async def ask(request):
        current_admission.set(Admission())
        await checked(request, door)
        return await connector.fetch_image_async(url)

    await asyncio.create_task(ask(chat(url)))
    with pytest.raises(RefusedByRouter):
        await asyncio.create_task(ask(chat()))


async def test_what_the_door_has_not_seen_is_not_read(connector, admission, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(FILES["plain"])
    url = data_url(FILES["plain"])
    calls = [
        lambda: connector.fetch_image(url),
        lambda: connector.fetch_image(f"file://{path}"),
        lambda: connector.fetch_video(url),
        lambda: connector.fetch_audio(url),
        lambda: connector.fetch_image_embedding("AAAA"),
    ]
    for call in calls:
        with pytest.raises(RefusedByRouter):
            call()
    for call in (connector.fetch_image_async, connector.fetch_video_async, connector.fetch_audio_async):
        with pytest.raises(RefusedByRouter):
            await call(url)
    with pytest.raises(RefusedByRouter):
        await connector.fetch_image_embedding_async("AAAA")


async def test_a_model_that_does_not_see(admission):
    said = r"^messages\[0\]\.content\[0\]: images are not served here"
    with pytest.raises(RefusedByRouter, match=said) as refused:
        await checked(chat("http://192.0.2.1/never-fetched.png"), None)
    assert refused.value.http_status == 400
    assert "images are not served" in admission.error.message


async def test_a_bad_image_in_anthropics_form(door, admission):
    """Errors name the part in the client's request, not in the chat that vLLM makes of it."""
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
    messages = [{"role": "user", "content": [result]}]
    request = AnthropicMessagesRequest(model="m", max_tokens=1, messages=messages)

    async def never(*_):
        raise AssertionError

    handler = SimpleNamespace(
        create_messages=never, count_tokens=never, message_stream_converter=None, messages_full_converter=len
    )
    adopt_messages(State({"anthropic_serving_messages": handler}), door)
    answer = await handler.create_messages(request, None)
    assert answer.error.code == 400
    assert answer.error.message.startswith("messages[0].content[0].content[0]: it is not a readable")


async def test_images_of_an_earlier_response(door, connector, admission):
    url = data_url(FILES["plain"])
    earlier = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]
    request = ResponsesRequest(model="m", input="And now?", previous_response_id="resp_1")
    await checked(request, door, msg_store={"resp_1": earlier})
    assert (await connector.fetch_image_async(url)).media.size == picture().size


def test_options_that_change_how_images_are_read():
    config = SimpleNamespace(media_io_kwargs={"image": {"image_mode": None}})
    with pytest.raises(StartError, match="media_io_kwargs is not for you to set"):
        use_admitted_images(SimpleNamespace(multimodal_config=config))
