"""A router gets all replies in order and signs of life; one that does not read is cut off."""

import asyncio

from baton.protos.worker_pb2 import Failed, RunReply
from baton.services.worker import router_session as sessions
from baton.services.worker.router_session import QUEUE_LIMIT, RouterSession
from harness.support import PATIENCE


class Sink:
    """gRPC, which accepts replies once `open` is set."""

    def __init__(self):
        self.open = asyncio.Event()
        self.taken = asyncio.Event()
        self.got = []
        self.signs_of_life = 0

    async def write(self, reply):
        await self.open.wait()
        self.got += [failed.request_id for failed in reply.failed]
        self.signs_of_life += reply == RunReply()
        self.taken.set()


def reply(name):
    return RunReply(failed=[Failed(request_id=name)])


async def test_replies_are_sent_in_order():
    session, sink = RouterSession(1, "peer"), Sink()
    sink.open.set()
    writing = asyncio.create_task(session.write(sink))
    names = [str(number) for number in range(100)]
    for name in names:
        session.send(reply(name))
    assert not session.flushed
    async with asyncio.timeout(5 * PATIENCE):
        while len(sink.got) < len(names):
            sink.taken.clear()
            await sink.taken.wait()
    assert sink.got == names
    writing.cancel()


async def test_a_router_that_does_not_read_is_cut_off():
    session, sink = RouterSession(1, "peer"), Sink()
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


async def test_an_idle_stream_has_signs_of_life():
    session, sink = RouterSession(1, "peer"), Sink()
    sink.open.set()
    tasks = [asyncio.create_task(session.write(sink)), asyncio.create_task(session.stay_alive(0.01))]
    async with asyncio.timeout(5 * PATIENCE):
        while sink.signs_of_life < 3:
            sink.taken.clear()
            await sink.taken.wait()
    for task in tasks:
        task.cancel()


async def test_a_router_that_does_not_read_gets_no_signs_of_life(monkeypatch):
    monkeypatch.setattr(sessions, "QUEUE_LIMIT", 20)
    session, sink = RouterSession(1, "peer"), Sink()
    tasks = [asyncio.create_task(session.write(sink)), asyncio.create_task(session.stay_alive(0.001))]
    session.send(reply("stuck"))
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert not session.is_cut
    for task in tasks:
        task.cancel()


async def test_large_replies_cut_a_router_off_sooner(monkeypatch):
    monkeypatch.setattr(sessions, "QUEUE_BYTES", 1000)
    session, sink = RouterSession(1, "peer"), Sink()
    session.send(RunReply(engine_outputs=bytes(2000)))  # a single one may have any size
    writing = asyncio.create_task(session.write(sink))
    await asyncio.sleep(0)
    session.send(RunReply(engine_outputs=bytes(600)))
    session.send(RunReply(engine_outputs=bytes(400)))
    assert not session.is_cut
    session.send(RunReply(engine_outputs=bytes(1)))
    assert session.is_cut
    writing.cancel()
