"""A router gets all replies in order and signs of life; one that does not read is cut off."""

import asyncio

import pytest

from baton.protos.worker_pb2 import Failed, RunReply
from baton.services.worker import router_session as sessions
from baton.services.worker.router_session import RouterSession
from harness.scheduling import until

QUEUED = 100


class Sink:
    """gRPC, which accepts replies once `open` is set."""

    def __init__(self):
        self.open = asyncio.Event()
        self.got = []
        self.signs_of_life = 0

    async def write(self, reply):
        await self.open.wait()
        self.got += [failed.request_id for failed in reply.failed]
        self.signs_of_life += reply == RunReply()


@pytest.fixture
async def sink():
    return Sink()


@pytest.fixture
async def session(sink, monkeypatch):
    """Yield a session that writes to the sink."""
    monkeypatch.setattr(sessions, "QUEUE_LIMIT", QUEUED)
    made = RouterSession(1, "peer")
    writing = asyncio.create_task(made.write(sink))
    yield made
    writing.cancel()


def reply(name):
    return RunReply(failed=[Failed(request_id=name)])


async def test_replies_are_sent_in_order(session, sink):
    sink.open.set()
    names = [str(number) for number in range(QUEUED)]
    for name in names:
        session.send(reply(name))
    assert not session.flushed
    await until(lambda: len(sink.got) >= QUEUED)
    assert sink.got == names


async def test_a_router_that_does_not_read_is_cut_off(session):
    for number in range(QUEUED):
        session.send(reply(str(number)))
    assert not session.is_cut
    session.send(reply("one too many"))
    assert session.is_cut
    await asyncio.wait_for(session.wait_over(), 1)
    session.send(reply("ignored"))
    assert session.flushed  # a drain does not wait for it


async def test_an_idle_stream_has_signs_of_life(session, sink):
    sink.open.set()
    alive = asyncio.create_task(session.stay_alive(0.01))
    await until(lambda: sink.signs_of_life >= 3)
    alive.cancel()


async def test_a_router_that_does_not_read_gets_no_signs_of_life(session):
    session.send(reply("stuck"))
    alive = asyncio.create_task(session.stay_alive(0.001))
    for _ in range(2 * QUEUED):
        await asyncio.sleep(0.001)
    assert not session.is_cut
    alive.cancel()


async def test_large_replies_cut_a_router_off_sooner(session, monkeypatch):
    monkeypatch.setattr(sessions, "QUEUE_BYTES", 1000)
    session.send(RunReply(engine_outputs=bytes(2000)))  # a single one may have any size
    await until(lambda: session._sending)
    session.send(RunReply(engine_outputs=bytes(600)))
    session.send(RunReply(engine_outputs=bytes(400)))
    assert not session.is_cut
    session.send(RunReply(engine_outputs=bytes(1)))
    assert session.is_cut
