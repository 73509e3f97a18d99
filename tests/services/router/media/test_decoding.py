"""Files of all kinds, decoded in a router's processes: as vLLM decodes them, or refused with a reason."""

import asyncio
import base64
import time
import warnings
import zlib
from pathlib import Path

import psutil
import pytest
from vllm.multimodal.media.image import ImageMediaIO

from baton.services.config import MediaSettings
from baton.services.router.errors import Overloaded, RequestFailed, Unsupported
from baton.services.router.media.door import MediaDoor
from baton.services.router.media.parts import Part
from baton.services.router.media.processes import SLOTS, Decoders
from harness.fake_worker import until
from harness.pictures import chunk, data_url, frames, picture, png, saved, turned, webp_header

PLACE = "messages[2].content[1]"
PNG = "data:image/png;base64,"
LIMIT = MediaSettings(max_megapixels=1)


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def door(loop):
    one = MediaDoor(LIMIT, 8 << 20)
    loop.run(one.__aenter__())
    yield one
    loop.run(one.__aexit__(None, None, None))


@pytest.fixture
def admitted(loop, door):
    def admit(*urls, client="a"):
        images = loop.run(door.admit([Part(PLACE, url) for url in urls], client))
        return [images[url] for url in urls]

    return admit


def gray16():
    rows = b"".join(b"\0" + bytes(range(2 * y, 2 * y + 64)) for y in range(20))
    return png(32, 20, bits=16, rows=zlib.compress(rows))


def rgb16():
    rows = b"".join(b"\0" + bytes((7 * y + x) % 256 for x in range(6 * 32)) for y in range(20))
    return png(32, 20, bits=16, color=2, rows=zlib.compress(rows))


GOOD = {
    "rgb png": lambda: (saved(picture()), "png"),
    "gray png": lambda: (saved(picture("L")), "png"),
    "1 bit": lambda: (saved(picture("1")), "png"),
    "palette": lambda: (saved(picture("P")), "png"),
    "palette with transparency": lambda: (saved(picture("P"), transparency=3), "png"),
    "rgb with transparency": lambda: (saved(picture(), transparency=(0, 37, 74)), "png"),
    "gray with alpha": lambda: (saved(picture("LA")), "png"),
    "rgba": lambda: (saved(picture("RGBA").rotate(45)), "png"),
    "16 bit gray": lambda: (gray16(), "png"),
    "16 bit rgb": lambda: (rgb16(), "png"),
    "interlaced header, plain text": lambda: (png(32, 20, chunk(b"tEXt", b"a\0b"), bits=8), "png"),
    "jpeg": lambda: (saved(picture(), "JPEG"), "jpeg"),
    "image/jpg": lambda: (saved(picture(), "JPEG"), "jpg"),
    "progressive jpeg": lambda: (saved(picture(), "JPEG", progressive=True), "jpeg"),
    "gray jpeg": lambda: (saved(picture("L"), "JPEG"), "jpeg"),
    "cmyk jpeg": lambda: (saved(picture("CMYK"), "JPEG"), "jpeg"),
    "photo with a preview (mpo)": lambda: (
        saved(picture(), "MPO", save_all=True, append_images=[picture(size=(8, 8))]),
        "jpeg",
    ),
    "webp": lambda: (saved(picture(), "WEBP"), "webp"),
    "webp with alpha": lambda: (saved(picture("RGBA").rotate(30), "WEBP", lossless=True), "webp"),
    "still gif": lambda: (saved(picture("P"), "GIF"), "gif"),
    "1 x 1": lambda: (saved(picture(size=(1, 1))), "png"),
    "200 x 1": lambda: (saved(picture(size=(200, 1))), "png"),
    "1 megapixel from 1 kB": lambda: (png(1000, 1000), "png"),
    "damaged exif": lambda: (saved(picture(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\0"), "jpeg"),
    **{f"exif {n}": lambda n=n: (turned(n), "jpeg") for n in range(1, 9)},
    "exif 6 in a png": lambda: (turned(6, "PNG"), "png"),
    "exif 8 in a webp": lambda: (turned(8, "WEBP"), "webp"),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_files_are_what_vllm_makes_of_them(name, admitted):
    file, kind = GOOD[name]()
    (image,) = admitted(data_url(file, kind))
    with warnings.catch_warnings(action="ignore"):  # Pillow's, about damaged EXIF data
        theirs = ImageMediaIO().load_bytes(file)
    assert image.image.mode == theirs.media.mode == "RGB"
    assert image.image.size == theirs.media.size
    assert image.image.tobytes() == theirs.media.tobytes()
    assert (image.converted, image.file) == (theirs.io_config is not None, file)


BAD = {
    "20k x 20k": (lambda: data_url(png(20_000, 20_000)), "20000 x 20000 pixels; 1 megapixels are allowed"),
    "13,000 x 13,000": (lambda: data_url(png(13_000, 13_000)), "13000 x 13000 pixels"),
    "just above": (lambda: data_url(png(1001, 1000)), "1001 x 1000 pixels"),
    "webp of 16,383 x 16,383": (lambda: data_url(webp_header(16_383, 16_383), "webp"), "too many pixels"),
    "10,000 x 1": (lambda: data_url(png(10_000, 1)), "10000 x 1 pixels; one side may be 200 times the other"),
    "1 x 201": (lambda: data_url(png(1, 201)), "1 x 201 pixels"),
    "0 x 5": (lambda: data_url(png(0, 5)), "no pixels|not a readable"),
    "cut png": (lambda: data_url(saved(picture())[:-40]), "cannot be read"),
    "cut jpeg": (lambda: data_url(saved(picture(), "JPEG")[:-80], "jpeg"), "truncated"),
    "header only": (lambda: data_url(saved(picture())[:40]), "not a readable"),
    "wrong checksum": (lambda: data_url(saved(picture()).replace(b"IDAT", b"IDAT\xff")), "cannot be read"),
    "empty": (lambda: data_url(b""), "not a readable JPEG, PNG, WebP or GIF file"),
    "svg": (lambda: data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "not a readable"),
    "html": (lambda: data_url(b"<html>"), "not a readable"),
    "tiff": (lambda: data_url(saved(picture(), "TIFF"), "tiff"), "not a readable"),
    "bmp": (lambda: data_url(saved(picture(), "BMP"), "bmp"), "not a readable"),
    "jpeg as png": (lambda: data_url(saved(picture(), "JPEG")), "declared as PNG, but its content is JPEG"),
    "declared as html": (lambda: "data:text/html;base64,AAAA", "'text/html', which is no image"),
    "animated gif": (lambda: data_url(frames("GIF"), "gif"), "animated"),
    "animated webp": (lambda: data_url(frames("WEBP"), "webp"), "animated"),
    "animated png": (lambda: data_url(frames("PNG")), "animated"),
    "huge text": (
        lambda: data_url(
            png(9, 9, *[chunk(b"zTXt", b"a\0\0" + zlib.compress(b"a" * (1 << 20)))] * 80, bits=8)
        ),
        "too large|cannot be read|not a readable",
    ),
    "cut base64": (lambda: data_url(saved(picture()))[:-3], "not base64"),
    "no base64": (lambda: f"{PNG}@@@@", "not base64"),
    "wrapped base64": (lambda: PNG + base64.encodebytes(saved(picture())).decode(), "not base64"),
    "percent-encoded base64": (lambda: data_url(saved(picture())) + "%3D", "not base64"),
    "percent-encoded": (lambda: "data:image/png,%89PNG%0D", "must be data:image/FORMAT;base64,DATA"),
    "no comma": (lambda: "data:image/png;base64", "must be data:"),
    "file": (lambda: "file:///etc/hostname", "neither a data: nor an http"),
    "ftp": (lambda: "ftp://192.0.2.1/a.png", "neither"),
    "no scheme": (lambda: "a.png", "neither"),
    "http": (lambda: "http://192.0.2.1/a.png", "not fetched here: send the file as a data: URL"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_by_name(name, admitted):
    make, why = BAD[name]
    good = data_url(saved(picture()))
    with pytest.raises(Unsupported, match=why) as refused:
        admitted(make())
    assert refused.value.message.startswith(f"{PLACE}: ")
    assert refused.value.status == 400
    assert len(admitted(good)) == 1  # the next request is served


def test_limits_of_a_request(admitted):
    url = data_url(png(250, 250))
    others = [data_url(png(500, 500, chunk(b"tEXt", b"a\0%d" % n))) for n in range(5)]
    assert len(admitted(*[url] * 16)) == 16  # one image, sixteen times
    with pytest.raises(Unsupported, match="17 images; 16 are allowed"):
        admitted(*[url] * 17)
    for found in (others, others[:1] * 5):
        with pytest.raises(Unsupported, match=r"1\.2 megapixels; 1 are allowed"):
            admitted(*found)


def test_room_for_pixels_is_given_back_with_the_last_reference(admitted, loop, door):
    before = door._pixels.free
    images = admitted(data_url(png(900, 1000)))
    assert door._pixels.free == before - 900_000
    del images
    loop.run(until(lambda: door._pixels.free == before, "the room is free"))


async def test_requests_wait_for_room_and_may_leave():
    async with MediaDoor(LIMIT, 8 << 20) as door:
        urls = [data_url(png(1000, 1000, chunk(b"tEXt", b"a\0%d" % n))) for n in range(4)]
        held = [await door.admit([Part(PLACE, url)], "a") for url in urls]
        waiting = asyncio.create_task(door.admit([Part(PLACE, data_url(png(9, 9)))], "b"))
        leaving = asyncio.create_task(door.admit([Part(PLACE, data_url(png(9, 9)))], "c"))
        await until(lambda: len(door._pixels._waiting) == 2, "both wait")
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        now = time.monotonic()
        with pytest.raises(RequestFailed) as late:
            await door.admit([Part(PLACE, data_url(png(9, 9)))], "d", now + 0.1)
        assert late.value.status == 504
        del held
        assert len(await waiting) == 1
        del waiting
        await until(lambda: door._pixels.free == door._pixels.most, "all room is free")


async def test_a_process_that_takes_too_long_is_killed_and_replaced():
    slow = Decoders(16_000_000, 8, cpu_s=0.02)
    async with slow.lent("a") as lent:
        await lent.take(png(4000, 4000))
        with pytest.raises(Unsupported, match="takes too long"):
            await lent.decode(0)
    assert not slow._idle
    decoders = Decoders(16_000_000, 8)
    async with decoders.lent("a") as lent:
        killed = lent._process._process
        killed.kill()
        await killed.wait()
        with pytest.raises(Unsupported, match="its decoding fails"):
            await lent.take(saved(picture()))
    async with decoders.lent("a") as lent:
        await lent.take(saved(picture()))
        image, converted = await lent.decode(0)
    assert (image.tobytes(), converted) == (picture().tobytes(), False)
    await decoders.close()


async def test_a_process_that_does_not_start(monkeypatch, tmp_path):
    monkeypatch.setattr("baton.services.router.media.processes._PROGRAM", tmp_path / "none.py")
    decoders = Decoders(16_000_000, 8)

    async def use():
        async with decoders.lent("a"):
            pass

    with pytest.raises(Overloaded, match="no process can be started"):
        await use()
    assert decoders._turns._free == SLOTS


@pytest.mark.parametrize("reply", ["b'[]\\n'", "b'{' * 9999"])
async def test_a_process_that_replies_nonsense_is_killed(monkeypatch, tmp_path, reply):
    program = tmp_path / "nonsense.py"
    program.write_text(
        "import socket\nours = socket.socket(fileno=0)\n"
        f"for reply in (b'{{}}\\n', {reply}):\n    ours.recv(9999)\n    ours.sendall(reply)\nours.recv(1)\n"
    )
    monkeypatch.setattr("baton.services.router.media.processes._PROGRAM", program)
    decoders = Decoders(16_000_000, 8)
    async with decoders.lent("a") as lent:
        with pytest.raises(Unsupported, match="its decoding fails"):
            await lent.take(b"x")
    assert not decoders._idle


@pytest.mark.parametrize("turns", range(0, 60, 10))
async def test_a_client_that_leaves_at_any_time_leaves_no_process(turns):
    before, decoders = psutil.Process().children(), Decoders(16_000_000, 8)

    async def use():
        async with decoders.lent("a") as lent:
            await lent.take(saved(picture()))
            await lent.decode(0)

    task = asyncio.create_task(use())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert decoders._turns._free == SLOTS
    await decoders.close()
    ours = [one for one in psutil.Process().children() if one not in before]
    await until(lambda: not any(map(psutil.pid_exists, (one.pid for one in ours))), "all have ended")


async def test_a_machine_that_is_too_busy():
    decoders = Decoders(16_000_000, 8, wall_s=0.05)

    async def wait():
        async with decoders.lent("a"):
            await asyncio.Event().wait()

    with pytest.raises(Overloaded, match="too busy"):
        await wait()
    await decoders.close()


async def test_a_process_has_no_environment_and_opens_nothing(monkeypatch):
    monkeypatch.setenv("BATON_ROUTER__API_KEY", "secret")
    decoders = Decoders(1_000_000, 8)
    async with decoders.lent("a") as lent:
        pid = lent._process._process.pid
        await lent.take(saved(picture()))
        process = Path(f"/proc/{pid}")
        assert "secret" not in (process / "environ").read_text()
        limits = (process / "limits").read_text().splitlines()
        limited = {line[:25].strip(): line[25:].split()[0] for line in limits}
        assert len(list((process / "fd").iterdir())) == 3 == int(limited["Max open files"])
        assert int(limited["Max address space"]) < 300 << 20
    await decoders.close()
