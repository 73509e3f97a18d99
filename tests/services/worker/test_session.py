"""A router that does not read is cut off; one that reads gets all, in order."""

from __future__ import annotations

import asyncio

from baton.protos.worker_pb2 import Failed, RunReply
from baton.services.worker.session import QUEUE_LIMIT, Session


class Sink:
    """gRPC's side: takes a reply when `open` is set."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.taken = asyncio.Event()
        self.got: list[str] = []

    async def write(self, reply: RunReply) -> None:
        await self.open.wait()
        self.got += [failed.request_id for failed in reply.failed]
        self.taken.set()


def reply(name: str) -> RunReply:
    return RunReply(failed=[Failed(request_id=name)])


async def test_all_is_sent_in_order() -> None:
    session, sink = Session(1, "peer"), Sink()
    sink.open.set()
    writing = asyncio.create_task(session.write(sink))
    names = [str(number) for number in range(100)]
    for name in names:
        session.send(reply(name))
    assert not session.flushed
    async with asyncio.timeout(5):
        while len(sink.got) < len(names):
            sink.taken.clear()
            await sink.taken.wait()
    assert sink.got == names
    writing.cancel()


async def test_a_router_that_does_not_read_is_cut_off() -> None:
    session, sink = Session(1, "peer"), Sink()
    writing = asyncio.create_task(session.write(sink))
    for number in range(QUEUE_LIMIT):
        session.send(reply(str(number)))
    assert not session.is_cut
    session.send(reply("one too many"))
    assert session.is_cut
    await asyncio.wait_for(session.wait_over(), 1)
    session.send(reply("ignored"))
    assert session.flushed  # a drain does not wait for it
    writing.cancel()
