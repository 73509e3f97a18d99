"""One worker follows an attempt at another over gRPC: dispatchers and services as shipped, idle engines."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from baton import rpc
from baton.handoff.errors import StagingFull
from baton.handoff.reports import Begun, Problem, Saved
from baton.protos import worker_pb2 as pb
from baton.protos import worker_pb2_grpc
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, Failed, RunReply, Start
from baton.security.names import Role
from baton.services.engine.host import EngineStep
from baton.services.worker import following, outgoing
from baton.services.worker.dispatcher import Dispatcher
from baton.services.worker.servicer import WorkerServicer
from harness.fake_worker import until
from harness.support import PATIENCE
from tests.security.conftest import Become
from tests.security.conftest import become as become
from tests.security.conftest import ca as ca
from tests.services.worker.test_dispatcher import KEY, Host, made, start


class Site:
    """A worker without an engine's work, and one router's stream to it."""

    def __init__(self, dispatcher: Dispatcher, host: Host, server: grpc.aio.Server, port: int) -> None:
        self.dispatcher, self.host, self.server, self.port = dispatcher, host, server, port
        self.session = dispatcher.connect("router")

    def start(self, message: Start) -> None:
        self.dispatcher.start(self.session, message)

    def replies(self) -> list[RunReply]:
        queue = self.session._queue
        return [queue.get_nowait() for _ in range(queue.qsize())]

    def failed(self) -> list[Failed]:
        return [one for reply in self.replies() for one in reply.failed]

    async def fails(self) -> Failed:
        found: list[Failed] = []
        await until(lambda: bool(found.extend(self.failed()) or found), "an attempt fails")
        [failed] = found
        return failed

    # As the engine tells of it.

    def begun(self, name: str) -> Manifest:
        manifest = Manifest(request_id=f"{name}#1", epoch=1, lease_s=60.0)
        self.dispatcher.on_step(EngineStep(begun=(Begun(f"{name}#1", 1, manifest),)))
        return manifest

    def prefilled(self, name: str, saved: Saved | None = None) -> Manifest:
        manifest = Manifest(request_id=f"{name}#1", epoch=1, lease_s=60.0, saved_at_s=1.0, chunks=2)
        kept = saved or Saved(f"{name}#1", 1, manifest)
        output = EngineCoreOutput(
            request_id=f"{name}#1", new_token_ids=[7], finish_reason=FinishReason.LENGTH
        )
        attempt = self.dispatcher._attempts.live(f"{name}#1")
        assert attempt is not None
        attempt.prepared.request.append_output_token_ids([7])
        outputs = {self.session.number: EngineCoreOutputs(outputs=[output])}
        drafts = {f"{name}#1": [8, 9]}
        self.dispatcher.on_step(EngineStep(outputs=outputs, saved=(kept,), drafts=drafts, executed=True))
        return manifest


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    host = Host()
    dispatcher, _ = await made(host)
    server = rpc.aio_server()
    nobody = cast(Any, None)
    service = WorkerServicer(nobody, dispatcher, 60.0, nobody, host=nobody, kv_host="")
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    port = rpc.listen(server, "worker.listen", "127.0.0.1:0")
    await server.start()
    site = Site(dispatcher, host, server, port)
    try:
        yield site
    finally:
        dispatcher.hang_up()
        await dispatcher.close()
        await server.stop(None)


@pytest.fixture
async def source() -> AsyncIterator[Site]:
    async with serving() as site:
        yield site


@pytest.fixture
async def target() -> AsyncIterator[Site]:
    async with serving() as site:
        yield site


def of(site: Site, message: Start, key: bytes = KEY) -> Start:
    message.source.CopyFrom(
        pb.Source(
            worker_id="p",
            address=f"127.0.0.1:{site.port}",
            request_id=message.request_id,
            key=key,
            tokens=20,
        )
    )
    return message


async def followed(site: Site, number: int = 1) -> None:
    await until(lambda: site.dispatcher.outgoing.followers == number, f"{number} follow")


async def test_a_manifest_goes_from_worker_to_worker(source: Site, target: Site) -> None:
    """The decode comes first; the router gets the token, and no manifest."""
    target.start(of(source, start("a")))
    await followed(source)
    source.start(start("a", phase=PHASE_PREFILL))
    source.begun("a")
    await until(lambda: target.host.begun == ["a#1"], "it pulls")
    assert target.host.resumed == []
    given: list[Any] = []
    target.host.resume = lambda *what: given.append(what)  # type: ignore[method-assign]
    manifest = source.prefilled("a")
    await until(lambda: bool(given), "it goes on")
    assert given[0][:3] == ("a#1", 1, manifest)
    [told] = source.replies()
    [saved] = told.saved
    assert (saved.problem, saved.saved_at_s, saved.chunks) == ("", 1.0, 2)
    await followed(source, 0)
    assert target.failed() == []


async def test_what_is_kept_is_told_at_once_and_again(source: Site, target: Site) -> None:
    source.start(start("a", phase=PHASE_PREFILL))
    source.prefilled("a")
    target.start(of(source, start("a")))
    await until(lambda: target.host.resumed == ["a#1"], "it goes on")
    async with rpc.aio_channel(f"127.0.0.1:{source.port}", Role.WORKER) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Follow(pb.FollowRequest(request_id="a", epoch=1, key=KEY), timeout=5 * PATIENCE)
        [reply] = [one async for one in call]
    assert (list(reply.complete.token_ids), list(reply.complete.draft_token_ids)) == ([7], [8, 9])


async def test_an_attempt_without_a_save_fails_who_follows_it(source: Site, target: Site) -> None:
    for name in "abc":
        target.start(of(source, start(name)))
        source.start(start(name, phase=PHASE_PREFILL))
    await followed(source, 3)
    source.dispatcher.abort(["a"])
    assert "NothingSaved" in (failed := await target.fails()).message
    assert (failed.request_id, failed.code) == ("a", Failed.CODE_HANDOFF)
    full = Saved("b#1", 1, None, Problem.of(StagingFull("no room")))
    source.dispatcher.on_step(EngineStep(saved=(full,)))
    assert (await target.fails()).message == "StagingFull: no room"
    broken = Saved("c#1", 1, None, Problem("SaveFailed", "a copy failed"))
    source.prefilled("c", broken)
    assert (await target.fails()).message == "SaveFailed: a copy failed"
    assert target.host.aborted == ["a#1", "b#1", "c#1"]


async def test_a_key_that_is_not_the_attempts_gets_nothing(source: Site, target: Site) -> None:
    source.start(start("a", phase=PHASE_PREFILL))
    source.prefilled("a")
    target.start(of(source, start("a"), b"sixteen others ."))
    failed = await target.fails()
    assert failed.code == Failed.CODE_HANDOFF
    assert "PERMISSION_DENIED: the key is not this attempt's" in failed.message


async def test_an_attempt_that_never_comes(
    source: Site, target: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "WAIT_S", 0.05)
    target.start(of(source, start("a")))
    failed = await target.fails()
    assert failed.code == Failed.CODE_HANDOFF  # the way to the source is fine
    assert "attempt 1 at request a did not arrive" in failed.message
    await followed(source, 0)


async def test_a_source_that_dies_is_lost(source: Site, target: Site) -> None:
    target.start(of(source, start("a")))
    await followed(source)
    began = asyncio.get_running_loop().time()
    await source.server.stop(None)
    assert (await target.fails()).code == Failed.CODE_SOURCE
    assert asyncio.get_running_loop().time() - began < 0.1 * PATIENCE  # its router waits for 0.25 s


async def test_a_source_that_ends_says_so(source: Site, target: Site) -> None:
    target.start(of(source, start("a")))
    await followed(source)
    source.dispatcher.hang_up()
    failed = await target.fails()
    assert failed.code == Failed.CODE_SOURCE
    assert "UNAVAILABLE: this worker is shutting down" in failed.message


@asynccontextmanager
async def cuttable(site: Site) -> AsyncIterator[Callable[[], int]]:
    """Stand between a worker and those that follow; yield what resets all connections, and counts them."""
    open_now: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        open_now.extend((writer, back))
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
        writer.transport.abort()

    def cut() -> int:
        cut, open_now[:] = list(open_now), []
        for one in cut:
            one.transport.abort()
        return len(cut) // 2

    port, server = site.port, await asyncio.start_server(serve, "127.0.0.1", 0)
    site.port = server.sockets[0].getsockname()[1]
    async with server:
        try:
            yield cut
        finally:
            cut()


def calls(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of those that ask a source from now on."""
    asked: list[str] = []
    follower = site.dispatcher.outgoing.follower

    def noting(request: pb.FollowRequest) -> Any:
        asked.append(request.request_id)
        return follower(request)

    monkeypatch.setattr(site.dispatcher.outgoing, "follower", noting)
    return asked


async def test_a_connection_that_is_reset_costs_no_prompt(
    source: Site, target: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that one worker follows at another comes through one connection."""
    async with cuttable(source) as cut:
        for name in "abc":
            target.start(of(source, start(name)))
        for name in "ab":
            source.start(start(name, phase=PHASE_PREFILL))
        source.begun("a")
        await until(lambda: target.host.begun == ["a#1"], "it pulls")
        asked = calls(source, monkeypatch)
        assert cut() == 1
        await until(lambda: sorted(asked) == ["a", "b", "c"], "they ask again")
        source.start(start("c", phase=PHASE_PREFILL))
        for name in "abc":
            source.prefilled(name)
        await until(lambda: sorted(target.host.resumed) == ["a#1", "b#1", "c#1"], "all go on")
    assert target.failed() == []
    assert target.host.begun == ["a#1"]


async def test_a_call_is_made_once_more_and_no_more(
    source: Site, target: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cuttable(source) as cut:
        target.start(of(source, start("a")))
        await followed(source)
        asked = calls(source, monkeypatch)
        assert cut() == 1
        await until(lambda: asked == ["a"], "it asks again")
        assert cut() == 1
        assert (await target.fails()).code == Failed.CODE_SOURCE
        assert asked == ["a"]


@pytest.mark.parametrize("how", ["abort", "stream", "a later attempt"])
async def test_who_loses_interest_hangs_up_and_releases_nothing(
    source: Site, target: Site, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[Manifest] = []
    monkeypatch.setattr(source.dispatcher, "_handoffs", released)
    source.start(start("a", phase=PHASE_PREFILL))
    source.begun("a")
    target.start(of(source, start("a")))
    await until(lambda: target.host.begun == ["a#1"], "it pulls")
    match how:
        case "abort":
            target.dispatcher.abort(["a"])
        case "stream":
            target.dispatcher.disconnect(target.session)
        case _:
            target.start(start("a", epoch=2))
    await followed(source, 0)
    assert target.host.aborted == ["a#1"]
    assert target.failed() == released == []


async def test_a_source_that_says_nothing_new_is_not_waited_for_for_ever(
    source: Site, target: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.dispatcher._entrance, "_request_s", 0.1)
    source.start(start("a", phase=PHASE_PREFILL))
    target.start(of(source, start("a")))
    failed = await target.fails()
    assert (failed.code, failed.message.partition(":")[0]) == (Failed.CODE_HANDOFF, "PullTimeout")
    await followed(source, 0)


async def test_an_address_where_nobody_answers(target: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are accepted, and nothing is said on them."""
    monkeypatch.setattr(following, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        message = start("a")
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        message.source.CopyFrom(pb.Source(worker_id="p", address=address, request_id="a", key=KEY, tokens=20))
        target.start(message)
        failed = await target.fails()
    assert failed.code == Failed.CODE_SOURCE
    assert "no connection to the source within 0.2 s" in failed.message


async def test_a_prompt_uses_its_beginning_if_that_comes_in_time(source: Site, target: Site) -> None:
    save = start("b", phase=pb.PHASE_SAVE)
    save.prefix_tokens = 10
    target.start(of(source, start("b", phase=PHASE_PREFILL)))
    source.start(save)
    source.prefilled("b")
    await until(lambda: target.host.submitted == ["b#1"], "its beginning is there")
    comes = target.dispatcher._attempts.live("b#1").incoming  # type: ignore[union-attr]
    assert comes is not None
    assert comes.loads


async def test_a_source_that_refuses_costs_a_prompt_no_second(source: Site, target: Site) -> None:
    loop = asyncio.get_running_loop()
    save = start("b", phase=pb.PHASE_SAVE)
    save.prefix_tokens = 10
    source.start(save)
    target.start(of(source, start("b", phase=PHASE_PREFILL)))
    await followed(source)
    began = loop.time()
    source.dispatcher.abort(["b"])
    await until(lambda: target.host.submitted == ["b#1"], "it is computed whole")
    assert loop.time() - began < 0.9 * PATIENCE
    assert target.failed() == []


async def test_channels_are_kept_while_they_are_used_and_closed_when_idle(
    source: Site, target: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "IDLE_S", 0.1)
    calls = target.dispatcher._entrance._following
    target.start(of(source, start("a")))
    await followed(source)
    calls._close_idle(0.0)
    assert len(calls._channels) == 1  # it is in use
    target.start(of(source, start("b")))
    await followed(source, 2)
    assert len(calls._channels) == 1
    target.dispatcher.abort(["a", "b"])
    await until(lambda: not calls._channels and not calls._closing, "it is closed")


async def test_many_sources_leave_no_more_channels_than_the_bound(
    source: Site, target: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MAX_CHANNELS", 1)
    target.start(of(source, start("a")))
    await followed(source)
    target.dispatcher.abort(["a"])
    await followed(source, 0)
    other = start("b", phase=PHASE_DECODE)
    other.source.CopyFrom(pb.Source(worker_id="q", address="127.0.0.1:9", request_id="b", key=KEY, tokens=20))
    target.start(other)
    await target.fails()
    assert list(target.dispatcher._entrance._following._channels) == ["127.0.0.1:9"]


async def test_a_certificate_that_is_replaced_breaks_no_call(
    become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt may be computed for longer than a certificate lives."""
    become(Role.WORKER, "p")
    async with serving() as source:
        become(Role.WORKER, "d")
        async with serving() as target:
            target.start(of(source, start("a")))
            await followed(source)
            calls = target.dispatcher._entrance._following
            monkeypatch.setattr(calls, "_dialler", rpc.Dialler(Role.WORKER))
            become(Role.WORKER, "d")
            monkeypatch.setattr(calls, "_dialler", rpc.Dialler(Role.WORKER))
            target.start(of(source, start("b")))
            await followed(source, 2)
            source.start(start("a", phase=PHASE_PREFILL))
            source.prefilled("a")
            await until(lambda: target.host.resumed == ["a#1"], "it goes on")
            await until(lambda: len(calls._channels) == 1 and not calls._closing, "the old channel is closed")
            assert target.failed() == []


async def test_a_router_may_not_follow(become: Become) -> None:
    become(Role.WORKER, "p")
    async with serving() as source:
        become(Role.ROUTER)
        async with serving() as target:
            target.start(of(source, start("a")))
            failed = await target.fails()
    assert failed.code == Failed.CODE_HANDOFF
    assert "router may not call Worker/Follow" in failed.message
