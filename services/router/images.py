"""Prepared images as a router holds and sends them, and the limit on their memory.

This limit is separate from the journal's limit on text, so images never make text wait. A tenant, or a client
if there are no tenants, may hold half of the budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import xxhash

from baton.protos import worker_pb2
from baton.services.engine.images import MOST_BYTES
from baton.services.router.errors import NotAdmitted, Why

PART_BYTES = 4 << 20
SENT_BYTES = MOST_BYTES  # size of the images that a stream remembers having sent: half of what a worker keeps


@dataclass(frozen=True, eq=False)
class Image:
    """A prepared image, shared by all requests with it."""

    identifier: str
    item: bytes  # as the engine's wire encodes it
    tokens: int = 0  # how many tokens of a prompt it becomes
    request: bytes = b""  # vLLM's EngineCoreRequest with this image alone, as metadata, msgpack

    @property
    def size(self) -> int:
        return len(self.item)

    @cached_property
    def digest(self) -> int:
        return xxhash.xxh3_64_intdigest(self.item)

    def parts(self) -> Iterator[worker_pb2.RunRequest]:
        size = len(self.item)
        for begin in range(0, size, PART_BYTES):
            last = begin + PART_BYTES >= size
            part = self.item[begin : begin + PART_BYTES]
            media = worker_pb2.Media(
                identifier=self.identifier, part=part, last=last, digest=self.digest if last else 0
            )
            yield worker_pb2.RunRequest(media=media)


class Images:
    """The images of the requests in a journal, each counted once."""

    def __init__(self) -> None:
        self.size = 0  # bytes
        self._requests: Counter[Image] = Counter()

    def more(self, images: Iterable[Image]) -> int:
        """Return the size in bytes of the images that are not counted yet."""
        return sum(image.size for image in set(images) if image not in self._requests)

    def enter(self, images: Iterable[Image]) -> None:
        self.size += self.more(images)
        self._requests.update(images)

    def leave(self, images: Iterable[Image]) -> None:
        for image in images:
            self._requests[image] -= 1
            if not self._requests[image]:
                del self._requests[image]
                self.size -= image.size


class Sent:
    """The images that a worker got on one stream and probably still keeps, by name."""

    def __init__(self, limit: int = SENT_BYTES) -> None:
        self._sizes: dict[str, int] = {}  # in the order of their last use
        self._size = 0
        self._limit = limit

    def add(self, image: Image) -> bool:
        """Note the use of an image. Return whether it must be sent."""
        known = self._sizes.pop(image.identifier, None)
        size = self._sizes[image.identifier] = len(image.item)
        if known is not None:
            return False
        self._size += size
        while self._size > self._limit and len(self._sizes) > 1:
            self.forget(next(iter(self._sizes)))
        return True

    def forget(self, identifier: str) -> None:
        self._size -= self._sizes.pop(identifier, 0)

    def forget_all(self, identifiers: Iterable[str]) -> None:
        for identifier in identifiers:
            self.forget(identifier)


BUDGET_BYTES = 4 * MOST_BYTES
_RETRY_AFTER_S = 1.0


def budget_bytes(processes: int) -> int:
    """Return the budget of one of a router's processes: half of it must be enough for one request."""
    return max(2 * MOST_BYTES, BUDGET_BYTES // processes)


class ImageBudget:
    """The images of the requests in a journal. Each counts once in total, and once for each holder."""

    def __init__(self, limit: int = BUDGET_BYTES) -> None:
        """limit: bytes."""
        self.limit = limit
        self._all = Images()
        self._held: dict[str, tuple[Images, int]] = {}  # keyed by holder, with the number of its requests

    @property
    def size(self) -> int:
        return self._all.size

    def check(self, images: Sequence[Image], holder: str) -> None:
        """Check that there is room for a request's images. Raises NotAdmitted (503).

        `holder`: "" for requests without a known sender.
        """
        if not images:
            return
        held, _ = self._held.get(holder, (Images(), 0))
        if (wanted := self.size + self._all.more(images)) > self.limit:
            raise _full(f"the images of all requests would take {_mib(wanted)} of {_mib(self.limit)}")
        half = self.limit // 2
        if holder and (wanted := held.size + held.more(images)) > half:
            raise _full(f"your requests' images would take {_mib(wanted)}; {_mib(half)} are yours")

    def enter(self, images: Sequence[Image], holder: str) -> None:
        """Count a request's images. Raises like `check`."""
        self.check(images, holder)
        if not images:
            return
        held, requests = self._held.get(holder, (Images(), 0))
        self._all.enter(images)
        held.enter(images)
        self._held[holder] = held, requests + 1

    def leave(self, images: Sequence[Image], holder: str) -> None:
        if not images:
            return
        self._all.leave(images)
        held, requests = self._held.pop(holder)
        held.leave(images)
        if requests > 1:
            self._held[holder] = held, requests - 1


def _full(why: str) -> NotAdmitted:
    text = f"the router has no room for more images now: {why} (docs/images.md). Requests without images run"
    return NotAdmitted(text, Why.JOURNAL, _RETRY_AFTER_S)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
