"""Decode image files: `python decoder.py MOST_PIXELS`.

Started by `processes`, which may kill it at any time. Imports nothing but Pillow. Standard input is a socket
with a line of JSON per request and reply; a file's bytes follow its request. Standard output is a memory file
for the decoded pixels, as RGB.

    {"take": BYTES, "cpu_s": ...}  keep a file   -> {"format", "width", "height", "animated"} or {"problem"}
    {"decode": NUMBER}             decode it     -> {"width", "height", "converted"} or {"problem"}
    {"forget": true}               drop all files -> {}

`take` reads only a file's header; nothing is decoded before `decode`. Pixels equal those of vLLM's loader.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

from PIL import (  # all that open needs, because no file can be opened later
    GifImagePlugin,
    Image,
    ImageColor,
    ImageFile,
    ImageOps,
    ImagePalette,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
BASE_BYTES = 192 << 20  # address space for everything but images
BYTES_PER_PIXEL = 40  # a progressive JPEG's coefficients, or RGBA with its copies, and the result
BACKGROUND = (255, 255, 255)  # vLLM's background for transparent images
_CONNECTION, _PIXELS, _ERRORS = range(3)  # descriptors
_USED = (
    copy,
    ImageColor,
    ImagePalette,
    GifImagePlugin,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)


class Decoder:
    def __init__(self, pixels: int) -> None:
        self._pixels = pixels
        self._taken: list[Image.Image] = []

    def take(self, file: bytes) -> dict[str, Any]:
        image = Image.open(io.BytesIO(file), formats=FORMATS)
        self._taken.append(image)
        return {
            "format": "JPEG" if image.format == "MPO" else image.format,
            "width": image.width,
            "height": image.height,
            # A photo with a preview (MPO) counts as one image: vLLM, too, takes only the first.
            "animated": image.format != "MPO" and bool(getattr(image, "is_animated", False)),
        }

    def decode(self, number: int) -> dict[str, Any]:
        image = self._taken[number]
        image.load()  # before the next line, which would hide that a file is damaged
        with contextlib.suppress(Exception):  # damaged EXIF data are ignored, as in vLLM
            image = ImageOps.exif_transpose(image)
        rgb = as_rgb(image)
        data = rgb.tobytes()
        os.ftruncate(self._pixels, len(data))
        os.lseek(self._pixels, 0, os.SEEK_SET)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._pixels, rest) :]
        return {"width": rgb.width, "height": rgb.height, "converted": rgb is not image}

    def forget(self) -> dict[str, Any]:
        for image in self._taken:
            image.close()
        self._taken.clear()
        return {}


def as_rgb(image: Image.Image) -> Image.Image:
    """Return the image itself if it is RGB, else an RGB copy with its transparent parts on white."""
    if image.mode == "RGB":
        return image
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        solid = Image.new("RGB", image.size, BACKGROUND)
        solid.paste(image, mask=image.getchannel("A"))
        return solid
    return image.convert("RGB")


def answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except MemoryError:
        return {"problem": "its decoding needs too much memory"}
    except UnidentifiedImageError:
        return {"problem": "it is not a readable JPEG, PNG, WebP or GIF file"}
    except Exception as error:  # noqa: BLE001 (told to the client: Pillow's plug-ins raise any exception)
        if "create decoder" in str(error):  # WebP's decoder allocates memory for the whole image at once
            return {"problem": "it has too many pixels, or is damaged"}
        return {"problem": f"it cannot be read: {str(error)[:200] or type(error).__name__}"}


def serve(connection: socket.socket, pixels: int) -> None:
    decoder = Decoder(pixels)
    with connection, connection.makefile("rb") as asked:
        while line := asked.readline():
            request = json.loads(line)
            if "take" in request:
                file = asked.read(request["take"])
                if request["cpu_s"]:  # the first file of a request
                    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
                reply = answer(lambda: decoder.take(file))  # noqa: B023 (called at once)
            elif "decode" in request:
                reply = answer(lambda: decoder.decode(request["decode"]))  # noqa: B023
            else:
                signal.setitimer(signal.ITIMER_PROF, 0)
                reply = decoder.forget()
            connection.sendall(json.dumps(reply).encode() + b"\n")


def narrow(most_pixels: int) -> None:
    """Limit this process: less memory and priority, no core files, no further open files."""
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # the router checks sizes, between `take` and `decode`
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the CPU limit: ends the process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a draining router still needs this process
    os.setpriority(os.PRIO_PROCESS, 0, 10)
    memory = BASE_BYTES + most_pixels * BYTES_PER_PIXEL
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, most_pixels * 3),
        (resource.RLIMIT_NOFILE, _ERRORS + 1),
    ):
        resource.setrlimit(limit, (most, most))


def main() -> None:
    Image.preinit()
    narrow(int(sys.argv[1]))
    serve(socket.socket(fileno=_CONNECTION), _PIXELS)


if __name__ == "__main__":
    main()
