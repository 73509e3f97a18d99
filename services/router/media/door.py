"""Admit a request's images: check, fetch and decode all of them before anything is rendered.

vLLM is then given pixels, never files or URLs (`vllm.images`). Decoded pixels count until vLLM has dropped
them, even if the request has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from PIL import Image

from baton.services.config import MediaSettings
from baton.services.router.errors import Overloaded, RequestFailed, Unsupported
from baton.services.router.media.files import Fetcher, check_url, read_data_url
from baton.services.router.media.parts import Part
from baton.services.router.media.processes import Decoders, Header, Lent, Store, Turns

AT_ONCE = 4  # decoded pixels of all requests that are waiting for vLLM, in multiples of one request's limit
MAX_RATIO = 200  # longer side / shorter side; some models' processors raise an error beyond it
WAITING = 256  # requests that may wait
WAIT_S = 60.0
FETCHING, FETCHING_EACH = 8, 4  # requests, in total and per client, fetching or waiting for a decoder


@dataclass(frozen=True, slots=True)
class Admitted:
    file: bytes = field(repr=False)
    image: Image.Image  # RGB
    converted: bool  # the file has another mode


Images = dict[str, Admitted]  # by URL
Counted = Callable[[str, int, float], None]  # outcome, images, seconds


class MediaDoor:
    """Admits images for all models of a router. Use it inside `async with`, in one event loop."""

    def __init__(self, settings: MediaSettings, most_bytes: int, counted: Counted = lambda *_: None) -> None:
        """Fetch at most `most_bytes` for a request; tell `counted` what became of its images."""
        self._settings = settings
        self._most_bytes = most_bytes
        self._most = settings.max_megapixels * 1_000_000
        self._pixels = Store(AT_ONCE * self._most)
        self._decoders = Decoders(self._most, WAITING)
        self._fetching = Turns(FETCHING, FETCHING_EACH, WAITING)
        self._fetcher = Fetcher(most_bytes)
        self._counted = counted

    @property
    def pixels(self) -> int:
        """The pixels of decoded images in memory, including those being decoded."""
        return self._pixels.most - self._pixels.free

    async def __aenter__(self) -> MediaDoor:
        await self._fetcher.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._fetcher.__aexit__(*error)
        await self._decoders.close()

    async def admit(self, found: Sequence[Part], client: Hashable, deadline: float = math.inf) -> Images:
        """Return a request's images. `deadline`: time.monotonic.

        Raises Unsupported (400), naming the image at fault; Overloaded (503); or 504 after the deadline.
        """
        if not found:
            return {}
        began = time.monotonic()
        outcome = "refused"
        try:
            async with asyncio.timeout(min(deadline - began, WAIT_S)):
                images = await self._admit(found, client)
            outcome = "accepted"
        except TimeoutError:
            outcome = "late"
            if time.monotonic() < deadline:
                raise Overloaded(f"the images were not prepared within {WAIT_S:g} s", 1.0) from None
            raise RequestFailed(
                "the request took longer than allowed; its images were being prepared",
                status=HTTPStatus.GATEWAY_TIMEOUT,
            ) from None
        except Overloaded:
            outcome = "late"
            raise
        except asyncio.CancelledError:
            outcome = "left"
            raise
        finally:
            self._counted(outcome, len(found), time.monotonic() - began)
        return images

    async def _admit(self, found: Sequence[Part], client: Hashable) -> Images:
        if len(found) > self._settings.max_images:
            raise Unsupported(
                f"the request has {len(found)} images; {self._settings.max_images} are allowed "
                "(router.media.max_images)"
            )
        remote = {}
        for part in found:
            with _at(part):
                if url := check_url(part.url, self._settings.allowed_domains):
                    remote[part] = url
        if not remote:
            return await self._decode(found, {}, client)
        async with self._fetching.turn(client):
            fetched: dict[str, bytes] = {}
            for part, url in remote.items():
                if part.url not in fetched:
                    with _at(part):
                        fetched[part.url] = await self._fetcher.fetch(url)
                        if sum(map(len, fetched.values())) > self._most_bytes:
                            most = f"{self._most_bytes >> 20} MiB"
                            raise Unsupported(
                                f"the request's images are larger than {most} (router.max_body_mib)"
                            )
            return await self._decode(found, fetched, client)

    async def _decode(self, found: Sequence[Part], fetched: dict[str, bytes], client: Hashable) -> Images:
        unique = list({part.url: part for part in found}.values())
        async with self._decoders.lent(client) as decoder:
            files, headers = [], []
            for part in unique:
                with _at(part):
                    file = fetched.get(part.url)
                    file, declared = (file, "") if file is not None else read_data_url(part.url)
                    headers.append(self._checked(await decoder.take(file), declared))
                    files.append(file)
            each = dict(zip((part.url for part in unique), headers, strict=True))
            # vLLM prepares a repeated image again each time.
            if (pixels := sum(each[part.url].pixels for part in found)) > self._most:
                raise Unsupported(
                    f"all images have {pixels / 1e6:.1f} megapixels; {self._settings.max_megapixels} are "
                    "allowed (router.media.max_megapixels)"
                )
            images: Images = {}
            for part, image in zip(unique, await self._pictures(decoder, unique, headers), strict=True):
                images[part.url] = Admitted(files[len(images)], *image)
            return images

    async def _pictures(
        self, decoder: Lent, unique: Sequence[Part], headers: Sequence[Header]
    ) -> list[tuple[Image.Image, bool]]:
        """Decode the files. Room for all is taken first, so two requests never wait for each other."""
        rest = sum(one.pixels for one in headers)
        await self._pixels.take(rest)
        done: list[tuple[Image.Image, bool]] = []
        try:
            for number, part in enumerate(unique):
                with _at(part):
                    done.append(await self._picture(decoder, number, headers[number]))
                rest -= headers[number].pixels
        except BaseException:
            done.clear()  # a traceback would keep the images
            raise
        finally:
            self._pixels.give(rest)
        return done

    async def _picture(self, decoder: Lent, number: int, header: Header) -> tuple[Image.Image, bool]:
        image, converted = await decoder.decode(number)
        if image.width * image.height != header.pixels:
            raise Unsupported("its header and its content differ in size")
        self._give_back_after(image, header.pixels)
        return image, converted

    def _give_back_after(self, image: Image.Image, pixels: int) -> None:
        """Give room back once the image is no longer in memory, whichever thread frees it."""
        loop = asyncio.get_running_loop()

        def give() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._pixels.give, pixels)

        weakref.finalize(image, give).atexit = False

    def _checked(self, header: Header, declared: str) -> Header:
        if declared and declared.upper() != header.format:
            raise Unsupported(f"it is declared as {declared}, but its content is {header.format}")
        if header.animated:
            raise Unsupported("it is animated: send its frames as images")
        short, long = sorted((header.width, header.height))
        if not short:
            raise Unsupported("it has no pixels")
        if header.pixels > self._most:
            raise Unsupported(
                f"it has {header.width} x {header.height} pixels; {self._settings.max_megapixels} megapixels "
                "are allowed (router.media.max_megapixels)"
            )
        if long > MAX_RATIO * short:
            raise Unsupported(
                f"it has {header.width} x {header.height} pixels; one side may be {MAX_RATIO} times the other"
            )
        return header


@contextlib.contextmanager
def _at(part: Part) -> Iterator[None]:
    try:
        yield
    except Unsupported as error:
        raise Unsupported(f"{part.place}: {error.message}") from None
