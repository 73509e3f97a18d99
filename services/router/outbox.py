"""Queue the messages for one worker, so that images hold up no other requests.

Aborts and Starts of requests without images go between the parts of images. The images to send
are chosen when a request's turn comes, so a request aborted before its turn leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from baton.attempts import attempt_id
from baton.protos import worker_pb2
from baton.services.engine.images import MOST_BYTES
from baton.services.router.images import Image, Images, Sent

MAX_UNSENT_STARTS = 1024  # per worker; beyond it the worker counts as full
MAX_UNSENT_BYTES = MOST_BYTES  # bytes of images, likewise

_Write = Callable[[worker_pb2.RunRequest], Awaitable[None]]


class Outbox:
    """The unsent messages for one worker, and the images that it was sent."""

    def __init__(self, on_image: Callable[[Image], None]) -> None:
        """on_image: called with each image that is sent."""
        self.sent = Sent()
        self._on_image = on_image
        self._quick: deque[worker_pb2.RunRequest] = deque()
        self._quick_starts = 0
        self._with_images: dict[str, tuple[worker_pb2.Start, tuple[Image, ...]]] = {}  # keyed by attempt
        self._images = Images()  # of `_with_images`, some of them perhaps sent
        self._work = asyncio.Event()

    def start(self, start: worker_pb2.Start, images: Sequence[Image] = ()) -> bool:
        """Queue a Start, behind its images. Return False if too much is unsent."""
        if self._quick_starts + len(self._with_images) >= MAX_UNSENT_STARTS:
            return False
        if images:
            if self._with_images and self._images.size + self._images.more(images) > MAX_UNSENT_BYTES:
                return False
            self._with_images[attempt_id(start.request_id, start.epoch)] = start, tuple(images)
            self._images.enter(images)
        else:
            self._quick_starts += 1
            self._quick.append(worker_pb2.RunRequest(start=start))
        self._work.set()
        return True

    def abort(self, request_id: str) -> None:
        """Queue an Abort, and drop the request's Starts that are waiting for images."""
        for key in [key for key, (start, _) in self._with_images.items() if start.request_id == request_id]:
            self.drop(key)
        self._quick.append(worker_pb2.RunRequest(abort=worker_pb2.Abort(request_ids=[request_id])))
        self._work.set()

    def drop(self, attempt: str) -> None:
        if attempt in self._with_images:
            self._pop(attempt)

    def clear(self) -> None:
        self._quick.clear()
        self._quick_starts = 0
        for attempt in list(self._with_images):
            self._pop(attempt)

    async def send(self, write: _Write) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            await self._send_quick(write)
            while self._with_images:
                await self._send_images(next(iter(self._with_images)), write)

    async def _send_images(self, attempt: str, write: _Write) -> None:
        for image in self._with_images[attempt][1]:
            if self.sent.add(image):
                self._on_image(image)
                for part in image.parts():  # all parts, even after an abort: the worker joins them
                    await write(part)
                    await self._send_quick(write)
            if attempt not in self._with_images:
                return
        await write(worker_pb2.RunRequest(start=self._pop(attempt)))
        await self._send_quick(write)

    async def _send_quick(self, write: _Write) -> None:
        while self._quick:
            message = self._quick.popleft()
            self._quick_starts -= message.HasField("start")
            await write(message)

    def _pop(self, attempt: str) -> worker_pb2.Start:
        start, images = self._with_images.pop(attempt)
        self._images.leave(images)
        return start
