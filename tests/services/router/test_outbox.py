import asyncio
import contextlib

import pytest

from baton.attempts import attempt_id
from baton.protos.worker_pb2 import Start
from baton.services.router import images, outbox
from baton.services.router.images import Image
from baton.services.router.outbox import Outbox

A, B = Image("a", b"a" * 30), Image("b", b"b" * 20)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(images, "PART_BYTES", 10)
    monkeypatch.setattr(outbox, "MAX_UNSENT_BYTES", 50)


class Worker:
    def __init__(self):
        self.got = []
        self.turns = asyncio.Semaphore(0)

    async def write(self, message):
        await self.turns.acquire()
        if message.HasField("media"):
            self.got.append(message.media.identifier)
        elif message.HasField("start"):
            self.got.append(f"start {message.start.request_id}")
        else:
            self.got.append(f"abort {message.abort.request_ids[0]}")

    async def take(self, number, box):
        """Begin to take messages, up to `number` now."""
        self.sending = asyncio.create_task(box.send(self.write))
        return await self.more(number)

    async def more(self, number):
        for _ in range(number):
            self.turns.release()
        for _ in range(10 * number + 10):
            await asyncio.sleep(0)
        return list(self.got)


def start(name):
    return Start(request_id=name, epoch=1)


async def drained(box):
    worker = Worker()
    got = await worker.take(50, box)
    worker.sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await worker.sending
    return got


async def test_text_and_aborts_pass_between_the_parts_of_images():
    sent = []
    box, worker = Outbox(sent.append), Worker()
    assert box.start(start("one"), [A])
    assert await worker.take(1, box) == ["a"]
    assert box.start(start("text"))
    box.abort("other")
    # One part was being written already.
    assert await worker.more(6) == ["a", "a", "start text", "abort other", "a", "start one"]
    assert box.start(start("two"), [A, B])
    assert (await worker.more(3))[6:] == ["b", "b", "start two"]
    assert sent == [A, B]
    worker.sending.cancel()


@pytest.mark.parametrize("ended", ["aborted", "forgotten"])
async def test_nothing_is_sent_for_a_request_that_ended_before(ended):
    box = Outbox(lambda _: None)
    assert box.start(start("one"), [A])
    assert box.start(start("two"), [A, B])
    assert not box.start(start("three"), [Image("c", b"c")])  # 51 bytes
    if ended == "aborted":
        box.abort("one")
    else:
        box.drop(attempt_id("one", 1))
    box.drop(attempt_id("unknown", 1))
    aborts = ["abort one"] if ended == "aborted" else []
    assert await drained(box) == [*aborts, "a", "a", "a", "b", "b", "start two"]
    assert box.start(start("three"), [Image("c", b"c")])


async def test_a_request_that_ends_while_an_image_is_sent_leaves_it_whole():
    box, worker = Outbox(lambda _: None), Worker()
    assert box.start(start("one"), [A, B])
    await worker.take(1, box)
    box.abort("one")
    assert box.start(start("two"), [A])
    assert await worker.more(10) == ["a", "a", "abort one", "a", "start two"]
    worker.sending.cancel()


async def test_starts_are_bounded(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_UNSENT_STARTS", 2)
    box = Outbox(lambda _: None)
    assert box.start(start("1"))
    assert box.start(start("2"), [A])
    assert not box.start(start("3"))
    assert await drained(box) == ["start 1", "a", "a", "a", "start 2"]
    assert box.start(start("3"))
    box.clear()
    assert await drained(box) == []
