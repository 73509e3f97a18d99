import asyncio

import pytest

from baton.services.offline import client as client_module
from baton.services.offline.client import MAX_LOST, Client, Endpoint, each
from baton.services.offline.errors import DeploymentEnded, RequestError, Unavailable
from baton.services.offline.prompts import COMPLETIONS
from harness.support import PATIENCE, free_port

TIMEOUT_S = 600.0


@pytest.fixture
async def client(served):
    async with Client(Endpoint(served.url, TIMEOUT_S), 3) as one:
        yield one


async def ask(client, prompt):
    return await client.post(COMPLETIONS, {"prompt": prompt})


async def test_503_is_retried(served, client):
    assert (await ask(client, "full")).ok
    assert served.seen["full"] == 3


async def test_an_error_status_is_a_response(served, client):
    answer = await ask(client, "bad")
    assert (answer.status, str(answer.error())) == (400, "too long")
    assert served.seen["bad"] == 1


async def test_a_broken_connection_is_retried_a_few_times(served, client):
    with pytest.raises(RequestError, match="connection was lost 3 times"):
        await ask(client, "broken")
    assert served.seen["broken"] == MAX_LOST


async def test_without_any_response_it_is_unavailable(monkeypatch):
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.5)
    monkeypatch.setattr(client_module, "_PAUSE_S", 0.1)
    async with Client(Endpoint(f"http://127.0.0.1:{free_port()}", TIMEOUT_S), 4) as client:
        with pytest.raises(Unavailable, match=r"no request got a response for 0 s: http://127.0.0.1"):
            await ask(client, "x")


async def test_the_error_says_why_a_deployment_ended():
    def check():
        raise DeploymentEnded("decode-0 died 4 times")

    async with Client(Endpoint(f"http://127.0.0.1:{free_port()}", TIMEOUT_S, check=check), 4) as client:
        with pytest.raises(DeploymentEnded, match="died 4 times"):
            await ask(client, "x")


async def texts(client, prompt):
    return [event["text"] async for event in client.stream(COMPLETIONS, {"prompt": prompt})]


async def test_a_stream_may_be_split_anywhere_and_has_comments(client):
    """A router sends comments while a request waits (sse_keep_alive_interval)."""
    assert await texts(client, "streamed") == ["a", "b"]


async def test_an_invalid_stream_ends_one_request(client, monkeypatch):
    with pytest.raises(RequestError, match="is not a JSON object: 'oops'"):
        await texts(client, "garbled")
    monkeypatch.setattr(client_module, "MOST_BYTES", 1024)
    with pytest.raises(RequestError, match="an event of more than 0 MiB"):
        await texts(client, "endless")


async def test_concurrency_is_bounded(served, client):
    served.crowd = 3
    held = [asyncio.create_task(ask(client, f"held-{number}")) for number in range(10)]
    async with asyncio.timeout(10 * PATIENCE):
        await served.crowded.wait()
        served.released.set()
        assert all(answer.ok for answer in await asyncio.gather(*held))
    assert served.most == 3


async def test_an_item_is_taken_when_there_is_room():
    taken = []
    five, release = asyncio.Event(), asyncio.Event()

    async def work(item):
        taken.append(item)
        if len(taken) == 5:
            five.set()
        await release.wait()

    working = asyncio.create_task(each(iter(range(100)), work, 5))
    async with asyncio.timeout(10 * PATIENCE):
        await five.wait()
        assert taken == [0, 1, 2, 3, 4]
        release.set()
        await working
    assert taken == list(range(100))


async def test_the_first_exception_cancels_all():
    async def work(item):
        if item == 3:
            raise Unavailable("gone")
        await asyncio.Event().wait()

    async with asyncio.timeout(10 * PATIENCE):
        with pytest.raises(Unavailable):
            await each(iter(range(100)), work, 5)
