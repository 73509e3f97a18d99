import asyncio
import contextlib

import httpx
import pytest

from baton.addresses import split
from baton.services.router.ops import access, server
from baton.services.router.ops.access import FREE_TRIES, Tries
from harness.live_page import live_page
from harness.scheduling import Clock
from harness.support import CALL_S


async def heard(address, *pieces):
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


async def test_an_endless_upload_is_refused():
    part = b'--b\r\nContent-Disposition: form-data; name="key"; filename="x"\r\n\r\n' + bytes(1 << 16)
    head = (
        b"POST /ops/login HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    async with live_page(key="secret") as page:
        chunk = b"%x\r\n%s\r\n" % (len(part), part)
        got = await heard(page.url.removeprefix("http://"), head, *[chunk] * 200)
    # 413 if the first read brings more than the limit, as with Python 3.12
    assert got.startswith((b"HTTP/1.1 415", b"HTTP/1.1 413"))
    assert b"connection: close" in got


async def test_a_slow_client_gets_408(monkeypatch):
    monkeypatch.setattr(server, "SLOW_CLIENT_S", 0.3)
    async with live_page(key="secret") as page:
        where = page.url.removeprefix("http://")
        form = b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 9\r\n\r\nkey="
        for begun in (b"", b"GET /ops HTTP/1.1\r\n", b"POST /ops/login HTTP/1.1\r\n" + form):
            assert (await heard(where, begun)).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("by", ["form", "header"])
async def test_keys_cannot_be_guessed(by, monkeypatch):
    """After a few wrong keys even the right one is ignored for a while."""
    clock = Clock()
    monkeypatch.setattr(access, "Tries", lambda: Tries(clock))
    async with live_page(key="secret") as page, httpx.AsyncClient(base_url=page.url) as client:

        async def show(key):
            if by == "form":
                return await client.post("/ops/login", data={"key": key})
            return await client.get("/ops/first", headers={"authorization": f"Bearer {key}"})

        for _ in range(FREE_TRIES + 1):
            assert (await show("guess")).status_code in (303, 401)
        for key in ("guess", "secret"):
            refused = await show(key)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        clock.now += 1.1
        assert (await show("secret")).status_code in (303, 200)


async def test_a_key_is_read_from_its_field_of_a_plain_form():
    async with live_page(key="secret") as page, httpx.AsyncClient(base_url=page.url) as client:
        assert (await client.post("/ops/login", files={"key": b"secret"})).status_code == 415
        other = await client.post("/ops/login", data={"other": "secret"})
        assert other.headers["location"].endswith("?wrong")
