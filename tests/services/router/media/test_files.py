import asyncio
import socket

import pytest
from aiohttp import web

from baton.services.config import MediaSettings
from baton.services.router.errors import Unsupported
from baton.services.router.media.door import MediaDoor
from baton.services.router.media.files import Fetcher, check_url, is_public
from baton.services.router.media.parts import Part
from harness.fake_worker import until
from harness.pictures import picture, saved
from harness.serving import serving

FILE = saved(picture())


class Site:
    def __init__(self):
        self.asked = []
        self.left = asyncio.Event()

    async def answer(self, request):
        self.asked.append(request.path)
        name = request.path.strip("/")
        if name == "hop":
            raise web.HTTPFound("/a.png")
        if name == "missing":
            raise web.HTTPNotFound
        response = web.StreamResponse()
        if name == "long":
            response.content_length = 2 << 20
        await response.prepare(request)
        if name == "packed":
            assert request.headers["Accept-Encoding"] == "identity"
        for _ in range(64 if name in ("endless", "long") else 0):
            await response.write(b"x" * (32 << 10))
        if name == "slow":
            try:
                await asyncio.sleep(60)
            finally:
                self.left.set()
        await response.write(FILE)
        return response


@pytest.fixture
async def site():
    one = Site()
    async with serving(one.answer, handler_cancellation=True) as one.host:
        one.port = one.host.partition(":")[2]
        yield one


@pytest.fixture
def names(monkeypatch):
    """Names that resolve as a hostile or careless DNS would have them."""
    table = {}
    asked = []

    async def resolve(self, host, port, **options):
        asked.append(host)
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        answers = table[host]
        found = answers.pop(0) if isinstance(answers[0], list) else answers
        answer = []
        for address in found:
            if ":" in address:
                answer.append((socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0)))
            else:
                answer.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)))
        return answer

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", resolve)
    table["asked"] = asked
    return table


async def fetched(url, allowed, most=1 << 20, fetch_s=5.0):
    async with Fetcher(most, fetch_s) as fetcher:
        return await fetcher.fetch(check_url(url, allowed))


async def test_a_file_from_an_allowed_host(site):
    assert await fetched(f"http://{site.host}/packed", [site.host]) == FILE
    assert site.asked == ["/packed"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("hop", "redirects to another URL"),
        ("missing", "status 404"),
        ("long", "larger than 1 MiB"),
        ("endless", "larger than 1 MiB"),
    ],
)
async def test_what_a_server_may_not_do(site, path, why):
    with pytest.raises(Unsupported, match=why):
        await fetched(f"http://{site.host}/{path}", [site.host])
    assert site.asked == [f"/{path}"]


async def test_a_slow_server(site):
    with pytest.raises(Unsupported, match=r"does not send the file within 0\.2 s"):
        await fetched(f"http://{site.host}/slow", [site.host], fetch_s=0.2)


async def test_a_client_that_leaves_ends_the_fetch(site):
    async with MediaDoor(MediaSettings(allowed_domains=[site.host]), 1 << 20) as door:
        asking = asyncio.create_task(door.admit([Part("m", f"http://{site.host}/slow")], "a"))
        await until(lambda: site.asked, "the fetch begins")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(site.left.wait(), 10)


async def test_the_door_fetches_each_url_once_and_bounds_their_sum(site):
    url = f"http://{site.host}/a.png"
    async with MediaDoor(MediaSettings(allowed_domains=[site.host]), len(FILE) + 10) as door:
        images = await door.admit([Part("m[0]", url), Part("m[1]", url)], "a")
        assert images[url].image.tobytes() == picture().tobytes()
        assert site.asked == ["/a.png"]
        with pytest.raises(Unsupported, match=r"^m\[1\]: the request's images are larger"):
            await door.admit([Part("m[0]", url), Part("m[1]", f"{url}?2")], "a")


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["169.254.169.254"], ["::1"], ["::ffff:127.0.0.1"], ["fd00::1"]],
)
async def test_a_name_with_an_address_that_is_not_public(site, names, addresses):
    names["images.example.com"] = addresses
    allowed = [f"images.example.com:{site.port}"]
    with pytest.raises(Unsupported, match="its address is not public"):
        await fetched(f"http://images.example.com:{site.port}/a.png", allowed)
    assert not site.asked


async def test_a_name_is_resolved_once(site, names, monkeypatch):
    monkeypatch.setattr("baton.services.router.media.files.is_public", lambda address: address == "127.0.0.1")
    names["images.example.com"] = [["127.0.0.1"], ["127.0.0.2"]]
    allowed = [f"images.example.com:{site.port}"]
    assert await fetched(f"http://images.example.com:{site.port}/a.png", allowed) == FILE
    assert names["asked"] == ["images.example.com"]


async def test_an_unknown_name(names):
    with pytest.raises(Unsupported, match="its name is not known"):
        await fetched("http://images.example.com/a.png", ["images.example.com"])


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://other.example.com/a.png", "not fetched from 'other.example.com:443'"),
        ("https://sub.images.example.com/a.png", "not fetched"),
        ("https://images.example.com.evil.com/a.png", "not fetched"),
        ("https://images.example.com:8443/a.png", "not fetched from 'images.example.com:8443'"),
        ("https://images.example.com@evil.com/a.png", "with a user"),
        ("https://u:p@images.example.com/a.png", "with a user"),
        (r"https://evil.com\@images.example.com/", "not fetched|not a valid"),
        ("http://127.0.0.1/a.png", "not fetched"),
        ("http://2130706433/a.png", "not fetched"),
        ("http://[::ffff:127.0.0.1]/a.png", "not fetched"),
        ("http://[fe80::1%25eth0]/a.png", "not fetched|not a valid"),
        ("http:///a.png", "not fetched|not a valid"),
        ("https://images.example.com:99999/", "not a valid|not fetched"),
        ("gopher://images.example.com/", "neither"),
    ],
)
def test_urls_that_are_not_fetched(url, why):
    with pytest.raises(Unsupported, match=why):
        check_url(url, ["images.example.com", "files.example.com:8080"])


@pytest.mark.parametrize(
    "url",
    [
        "https://images.example.com/a%20b.png?x=%2F#f",
        "HTTP://Images.Example.COM./a.png",
        "http://files.example.com:8080/",
    ],
)
def test_urls_that_are_fetched(url):
    parsed = check_url(url, ["images.example.com", "files.example.com:8080"])
    assert not parsed.fragment


LOCAL = """127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.1.1
    255.255.255.255 240.0.0.1 192.0.2.1 198.18.0.1 :: ::1 fe80::1%eth0 fd00::1 fec0::1 ff02::1 ::ffff:10.0.0.1
    ::127.0.0.1 2002:7f00:1:: 64:ff9b::a00:1 2001:0:4136:e378:8000:63bf:3fff:fdd2"""


PUBLIC = ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")


@pytest.mark.parametrize("address", [*LOCAL.split(), *PUBLIC])
def test_addresses_that_are_public(address):
    assert is_public(address) == (address in PUBLIC)


@pytest.mark.parametrize("host", ["https://a.com", "a.com/x", "*.a.com", "", "a b"])
def test_domains_that_are_none(host):
    with pytest.raises(ValueError, match="is not a host"):
        MediaSettings(allowed_domains=[host])
