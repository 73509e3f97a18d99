"""The live page's port and hostile clients: how much it reads, for how long, and how often keys are tried."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from baton.addresses import split
from baton.services.router.ops import server as module
from baton.services.router.ops.tries import FREE, Tries
from harness.live_page import live_page
from harness.support import CALL_S


async def heard(address: str, *pieces: bytes) -> bytes:
    """Send the pieces, go silent, and return everything received until the end."""
    host, port = split(address)
    reader, writer = await asyncio.open_connection(host, port)
    answer = asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), CALL_S)
    try:
        return await asyncio.wait_for(answer, CALL_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_file_without_end_is_not_kept() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="key"; filename="x"\r\n\r\n' + bytes(1 << 16)
    head = (
        b"POST /ops/login HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    async with live_page(key="secret") as page:
        chunk = b"%x\r\n%s\r\n" % (len(part), part)
        got = await heard(page.url.removeprefix("http://"), head, *[chunk] * 200)
    assert got.startswith(b"HTTP/1.1 415")
    assert b"connection: close" in got


async def test_a_slow_client_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_CLIENT_S", 0.3)
    async with live_page(key="secret") as page:
        where = page.url.removeprefix("http://")
        form = b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 9\r\n\r\nkey="
        for begun in (b"", b"GET /ops HTTP/1.1\r\n", b"POST /ops/login HTTP/1.1\r\n" + form):
            assert (await heard(where, begun)).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("by", ["form", "header"])
async def test_a_key_is_not_guessed(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few wrong keys even the right one is ignored for a while."""
    now = 0.0
    monkeypatch.setattr(module, "Tries", lambda: Tries(now_s=lambda: now))
    async with live_page(key="secret") as page, httpx.AsyncClient(base_url=page.url) as client:

        async def show(key: str) -> httpx.Response:
            if by == "form":
                return await client.post("/ops/login", data={"key": key})
            return await client.get("/ops/first", headers={"authorization": f"Bearer {key}"})

        for _ in range(FREE):
            assert (await show("guess")).status_code in (303, 401)
        assert (await show("guess")).status_code in (303, 401)
        for key in ("guess", "secret"):
            refused = await show(key)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        now += 1.1
        assert (await show("secret")).status_code in (303, 200)


async def test_a_key_comes_in_a_form_alone() -> None:
    async with live_page(key="secret") as page, httpx.AsyncClient(base_url=page.url) as client:
        assert (await client.post("/ops/login", files={"key": b"secret"})).status_code == 415
        assert (
            (await client.post("/ops/login", data={"other": "secret"})).headers["location"].endswith("?wrong")
        )


def test_waits_grow_and_end() -> None:
    now = 0.0
    tries = Tries(now_s=lambda: now)
    waits = []
    for _ in range(FREE + 12):
        now += tries.wait_s("10.0.0.1")
        tries.failed("10.0.0.1")
        waits.append(tries.wait_s("10.0.0.1"))
    assert waits[:FREE] == [0.0] * FREE
    assert waits[FREE : FREE + 3] == [1.0, 2.0, 4.0]
    assert waits[-1] == 60.0
    assert tries.wait_s("10.0.0.2") == 0.0
    tries.passed("10.0.0.1")
    assert tries.wait_s("10.0.0.1") == 0.0


def test_the_table_is_bounded_and_a_network_is_one_address() -> None:
    now = 0.0
    tries = Tries(now_s=lambda: now, most=100)
    for number in range(10_000):
        for _ in range(FREE + 1):
            tries.failed(f"10.{number // 2500}.{number // 256 % 256}.{number % 256}")
    assert len(tries) <= 100
    assert tries.wait_s("192.0.2.1") > 0  # the table is full of waiting addresses, so no new one may try
    now += 3600.0
    assert tries.wait_s("192.0.2.1") == 0.0
    for number in range(FREE + 1):
        tries.failed(f"2001:db8::{number}")
    assert tries.wait_s("2001:db8::ffff") > 0  # the same /64 network
    assert tries.wait_s("2001:db8:1::1") == 0
