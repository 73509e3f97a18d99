"""A worker's images: assembled from parts, decoded once, kept within bounds."""

import xxhash

from baton.protos.worker_pb2 import Media
from baton.services.router.images import PART_BYTES, Image
from baton.services.worker import media
from baton.services.worker.media import Assembly, MediaStore, Received


def parts(data):
    return [message.media for message in Image("a", data).parts()]


def assembled(sent, by=None):
    by = by or Assembly()
    *first, last = [by.take(part) for part in sent]
    assert first == [None] * len(first)
    return last


def test_an_image_comes_in_parts():
    data = bytes(range(256)) * (2 * PART_BYTES // 256) + b"end"
    assert len(parts(data)) == 3
    assert assembled(parts(data)) == data


def test_a_changed_image_is_dropped_and_the_next_one_is_not():
    by = Assembly()
    changed = Media(identifier="a", part=b"abd", last=True, digest=xxhash.xxh3_64_intdigest(b"abc"))
    assert assembled([changed], by) is None
    assert assembled(parts(b"abc"), by) == b"abc"


def test_a_too_large_image_is_dropped_as_it_comes(monkeypatch):
    monkeypatch.setattr(media, "MOST_BYTES", PART_BYTES)
    by = Assembly()
    assert assembled(parts(b"x" * (PART_BYTES + 1)), by) is None
    assert assembled(parts(b"x" * PART_BYTES), by) == b"x" * PART_BYTES


async def test_the_least_recently_used_image_goes_first():
    store = MediaStore(bytes, limit=30)
    for name in "abc":
        await store.add(name, bytearray(name * 10, "ascii"))
    assert store.find("a") == b"a" * 10
    await store.add("d", bytearray(b"d" * 10))
    assert [name for name in "abcd" if store.find(name) is None] == ["b"]
    await store.add("c", bytearray(b"C" * 20))  # replaces it, and takes the room of another
    assert store.find("c") == b"C" * 20
    assert [name for name in "abd" if store.find(name) is not None] == ["d"]


async def test_an_unreadable_image_is_left_out():
    def decode(data):
        raise ValueError("no image")

    store = MediaStore(decode)
    assert await store.add("a", bytearray(b"a")) is None
    assert store.find("a") is None


def test_the_images_for_a_start_are_kept_within_a_requests_limit(monkeypatch):
    monkeypatch.setattr(media, "MOST_BYTES", 10)
    received = Received()
    received.add("a", 1, 6)
    received.add("b", 2, 5)
    received.prepared()  # a Start without images
    assert (received.find("a"), received.find("b")) == (None, 2)
    received.prepared()
    assert received.find("b") is None
