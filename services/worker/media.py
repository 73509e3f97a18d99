"""Keep decoded images, so that routers need not send them again for chat turns, retries and siblings.

An image arrives in parts on a router's stream (`Assembly`). A thread decodes it before the stream is read
further, so it is available when the Start that follows it is read. The least recently used images are
dropped first; the engine's requests keep references of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import xxhash

from baton.protos.worker_pb2 import Media
from baton.services.engine.images import MOST_BYTES

logger = logging.getLogger(__name__)

STORE_BYTES = 2 * MOST_BYTES  # maximum total size of the stored images


class MediaStore:
    """The images of one worker, by name. For one event loop."""

    def __init__(self, decode: Callable[[bytearray], Any], limit: int = STORE_BYTES) -> None:
        """decode: raises ValueError if an image is unreadable."""
        self._decode = decode
        self._limit = limit
        self._items: OrderedDict[str, tuple[Any, int]] = OrderedDict()  # with sizes in bytes
        self._size = 0

    def find(self, identifier: str) -> Any | None:
        if (kept := self._items.get(identifier)) is None:
            return None
        self._items.move_to_end(identifier)
        return kept[0]

    async def add(self, identifier: str, data: bytearray) -> Any | None:
        """Keep an image, and return it decoded. Unreadable ones are left out, so only their requests fail."""
        try:
            item = await asyncio.to_thread(self._decode, data)
        except ValueError as error:
            logger.warning("an image cannot be read: %s", error)
            return None
        self._size += len(data) - self._items.pop(identifier, (None, 0))[1]
        self._items[identifier] = item, len(data)
        while self._size > self._limit:
            _, (_, size) = self._items.popitem(last=False)
            self._size -= size
        return item


class Received:
    """The images that came on one stream for its next Start that needs images."""

    def __init__(self) -> None:
        self._items: dict[str, tuple[Any, int]] = {}  # with sizes in bytes
        self._size = 0
        self._asked = False

    def add(self, identifier: str, item: Any, size: int) -> None:
        self._size += size - self._items.pop(identifier, (None, 0))[1]
        self._items[identifier] = item, size
        while self._size > MOST_BYTES:
            self._size -= self._items.pop(next(iter(self._items)))[1]

    def find(self, identifier: str) -> Any | None:
        self._asked = True
        return self._items.get(identifier, (None, 0))[0]

    def prepared(self) -> None:
        """Drop the images if the Start that was prepared needed images."""
        if self._asked:
            self._items, self._size, self._asked = {}, 0, False


class Assembly:
    """The image whose parts are arriving on one stream."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._dropped = False

    def take(self, media: Media) -> bytearray | None:
        """Take a part. Return the image once it is complete and its digest is right."""
        self._dropped |= len(self._data) + len(media.part) > MOST_BYTES
        if self._dropped:
            self._data.clear()
        else:
            self._data += media.part
        if not media.last:
            return None
        data, dropped = self._data, self._dropped
        self._data, self._dropped = bytearray(), False
        if dropped or xxhash.xxh3_64_intdigest(data) != media.digest:
            logger.warning("an image of %d bytes is too large, or arrived changed: dropped", len(data))
            return None
        return data
