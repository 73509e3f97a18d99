"""Server-sent events, as in the standard."""

from __future__ import annotations

import random

import pytest

from baton.services.offline import sse
from baton.services.offline.client import Client, Endpoint
from baton.services.offline.errors import RequestError
from baton.services.offline.prompts import COMPLETIONS
from baton.services.offline.sse import Events
from tests.services.offline.router import Router

STREAM = (
    b"\xef\xbb\xbf: begins\n\n"
    b'data: {"a": "\xc3\xa9"}\n\n'
    b": keep-alive\n\n"
    b"event: message\r\nid: 7\r\ndata:one\r\ndata: two\r\nretry: 9\r\n\r\n"
    b": a comment within\ndata: three\n\n\n\n"
    b"data\r\r"
    b"data:  four\r\r"
    b"data: [DONE]\n\n"
    b"data: not whole\n"
)
FOUND = [b'{"a": "\xc3\xa9"}', b"one\ntwo", b"three", b" four", b"[DONE]"]


def test_a_stream_may_be_split_anywhere() -> None:
    whole = Events()
    assert whole.feed(STREAM) == FOUND
    for at in range(len(STREAM) + 1):
        events = Events()
        assert events.feed(STREAM[:at]) + events.feed(STREAM[at:]) == FOUND
    single = Events()
    assert [data for byte in STREAM for data in single.feed(bytes([byte]))] == FOUND


def test_random_pieces() -> None:
    chosen = random.Random(7)
    for _ in range(200):
        events, found, at = Events(), [], 0
        while at < len(STREAM):
            size = chosen.randrange(9)
            found += events.feed(STREAM[at : at + size])
            at += size
        assert found == FOUND


def test_an_event_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MOST_BYTES", 1 << 20)
    events = Events()
    line = b"data: " + b"x" * ((1 << 16) - 1) + b"\n"
    assert not any(events.feed(line) for _ in range(16))
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        events.feed(line)


async def test_comments_of_a_router_are_no_events(served: Router) -> None:
    """It sends them while a request waits (sse_keep_alive_interval)."""
    async with Client(Endpoint(served.url, 60.0), 1) as client:
        texts = [event["text"] async for event in client.stream(COMPLETIONS, {"prompt": "streamed"})]
    assert texts == ["a", "b"]


async def test_what_is_no_json_ends_one_request(served: Router) -> None:
    async with Client(Endpoint(served.url, 60.0), 1) as client:
        with pytest.raises(RequestError, match="is not a JSON object: 'oops'"):
            async for _ in client.stream(COMPLETIONS, {"prompt": "garbled"}):
                pass
