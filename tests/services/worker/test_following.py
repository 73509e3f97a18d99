"""A worker follows an attempt at another one over gRPC, with real dispatchers and servicers."""

import asyncio
import contextlib
import socket
from contextlib import asynccontextmanager

import pytest
from vllm.v1.engine import FinishReason

from baton import rpc
from baton.handoff.errors import StagingFull
from baton.handoff.reports import Begun, Problem, Saved
from baton.protos import worker_pb2 as pb
from baton.protos import worker_pb2_grpc
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import PHASE_PREFILL, Failed
from baton.security.names import Role
from baton.services.engine.step import EngineStep
from baton.services.worker import following, outgoing
from baton.services.worker.servicer import WorkerServicer
from harness.fake_worker import until
from harness.support import PATIENCE
from tests.security.conftest import become as become
from tests.security.conftest import ca as ca
from tests.services.worker.idle_worker import KEY, Worker, start, with_kv


class Site(Worker):
    """A worker that serves gRPC."""

    def __init__(self, engine=None, **sizes):
        super().__init__(engine, **sizes)
        self.server = rpc.aio_server()
        service = WorkerServicer(None, self.dispatcher, 60.0, None, host=None)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self.server)
        self.port = rpc.listen(self.server, "worker.listen", "127.0.0.1:0")

    def begin_to_save(self, name):
        manifest = Manifest(request_id=f"{name}#1", epoch=1, lease_s=60.0)
        self.dispatcher.on_step(EngineStep(begun=(Begun(f"{name}#1", 1, manifest),)))
        return manifest

    def prefilled(self, name, saved=None):
        manifest = Manifest(request_id=f"{name}#1", epoch=1, lease_s=60.0, saved_at_s=1.0, chunks=2)
        attempt = self.dispatcher._attempts.live(f"{name}#1")
        attempt.prepared.request.append_output_token_ids([7])
        kept = saved or Saved(f"{name}#1", 1, manifest)
        self.step(name, reason=FinishReason.LENGTH, saved=(kept,), drafts={f"{name}#1": [8, 9]})
        return manifest


@asynccontextmanager
async def serving(engine=None, **sizes):
    site = Site(engine, **sizes)
    await site.server.start()
    try:
        yield site
    finally:
        site.dispatcher.hang_up()
        await site.dispatcher.close()
        await site.server.stop(None)


@pytest.fixture
async def source():
    async with serving() as site:
        yield site


@pytest.fixture
async def target():
    async with serving() as site:
        yield site


def of(site, message, **source):
    return with_kv(message, **{"address": f"127.0.0.1:{site.port}", **source})


async def followed(site, number=1):
    await until(lambda: site.dispatcher.outgoing.followers == number, f"{number} follow")


async def test_a_manifest_goes_from_worker_to_worker(source, target):
    """The decode starts first; the router gets the token but not the manifest."""
    target.start(of(source, start("a")))
    await followed(source)
    source.start(start("a", phase=PHASE_PREFILL))
    source.begin_to_save("a")
    await until(lambda: target.engine.begun == ["a#1"], "it pulls")
    assert target.engine.resumed == []
    given = []
    target.engine.resume = lambda *what: given.append(what)
    manifest = source.prefilled("a")
    await until(lambda: bool(given), "it goes on")
    assert given[0][:3] == ("a#1", 1, manifest)
    [told] = source.replies()
    [saved] = told.saved
    assert (saved.problem, saved.saved_at_s, saved.chunks) == ("", 1.0, 2)
    await followed(source, 0)
    assert target.failed() == []


async def test_saved_kv_is_announced_to_every_follower(source, target):
    source.start(start("a", phase=PHASE_PREFILL))
    source.prefilled("a")
    target.start(of(source, start("a")))
    await until(lambda: target.engine.resumed == ["a#1"], "it goes on")
    async with rpc.aio_channel(f"127.0.0.1:{source.port}", Role.WORKER) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Follow(pb.FollowRequest(request_id="a", epoch=1, key=KEY), timeout=5 * PATIENCE)
        [reply] = [one async for one in call]
    assert (list(reply.complete.token_ids), list(reply.complete.draft_token_ids)) == ([7], [8, 9])


async def test_an_attempt_without_a_save_fails_its_follower(source, target):
    for name in "abc":
        target.start(of(source, start(name)))
        source.start(start(name, phase=PHASE_PREFILL))
    await followed(source, 3)
    source.dispatcher.abort(["a"])
    assert "NothingSaved" in (failed := await target.failure()).message
    assert (failed.request_id, failed.code) == ("a", Failed.CODE_HANDOFF)
    full = Saved("b#1", 1, None, Problem.of(StagingFull("no room")))
    source.dispatcher.on_step(EngineStep(saved=(full,)))
    assert (await target.failure()).message == "StagingFull: no room"
    broken = Saved("c#1", 1, None, Problem("SaveFailed", "a copy failed"))
    source.prefilled("c", broken)
    assert (await target.failure()).message == "SaveFailed: a copy failed"
    assert target.engine.aborted == ["a#1", "b#1", "c#1"]


async def test_a_wrong_key_is_refused(source, target):
    source.start(start("a", phase=PHASE_PREFILL))
    source.prefilled("a")
    target.start(of(source, start("a"), key=b"sixteen others ."))
    await target.fails(Failed.CODE_HANDOFF, "PERMISSION_DENIED: the key is not this attempt's")


async def test_an_attempt_that_never_arrives(source, target, monkeypatch):
    monkeypatch.setattr(outgoing, "WAIT_S", 0.05)
    target.start(of(source, start("a")))
    await target.fails(Failed.CODE_HANDOFF, "attempt 1 at request a did not arrive")
    await followed(source, 0)


async def test_a_source_that_dies_is_lost(source, target):
    target.start(of(source, start("a")))
    await followed(source)
    began = asyncio.get_running_loop().time()
    await source.server.stop(None)
    assert (await target.failure()).code == Failed.CODE_SOURCE
    assert asyncio.get_running_loop().time() - began < 0.1 * PATIENCE  # the router waits for 0.25 s


async def test_a_source_that_shuts_down(source, target):
    target.start(of(source, start("a")))
    await followed(source)
    source.dispatcher.hang_up()
    await target.fails(Failed.CODE_SOURCE, "UNAVAILABLE: this worker is shutting down")


@asynccontextmanager
async def cuttable(site):
    """Proxy a worker's followers; yield a function that resets all connections and counts them."""
    open_now = []

    async def serve(reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", port)
        open_now.extend((writer, back))
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    async def pass_on(reader, writer):
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
        writer.transport.abort()

    def cut():
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


def calls(site, monkeypatch):
    """Return a list to which each Follow call is added from now on."""
    asked = []
    follower = site.dispatcher.outgoing.follower

    def noting(request):
        asked.append(request.request_id)
        return follower(request)

    monkeypatch.setattr(site.dispatcher.outgoing, "follower", noting)
    return asked


async def test_calls_survive_a_reset_connection(source, target, monkeypatch):
    async with cuttable(source) as cut:
        for name in "abc":
            target.start(of(source, start(name)))
        for name in "ab":
            source.start(start(name, phase=PHASE_PREFILL))
        source.begin_to_save("a")
        await until(lambda: target.engine.begun == ["a#1"], "it pulls")
        asked = calls(source, monkeypatch)
        assert cut() == 1
        await until(lambda: sorted(asked) == ["a", "b", "c"], "the calls are retried")
        source.start(start("c", phase=PHASE_PREFILL))
        for name in "abc":
            source.prefilled(name)
        await until(lambda: sorted(target.engine.resumed) == ["a#1", "b#1", "c#1"], "all go on")
    assert target.failed() == []
    assert target.engine.begun == ["a#1"]


async def test_a_call_is_retried_only_once(source, target, monkeypatch):
    async with cuttable(source) as cut:
        target.start(of(source, start("a")))
        await followed(source)
        asked = calls(source, monkeypatch)
        assert cut() == 1
        await until(lambda: asked == ["a"], "the call is retried")
        assert cut() == 1
        assert (await target.failure()).code == Failed.CODE_SOURCE
        assert asked == ["a"]


@pytest.mark.parametrize("how", ["abort", "stream", "a later attempt"])
async def test_a_follower_that_leaves_releases_nothing(source, target, how, monkeypatch):
    released = []
    monkeypatch.setattr(source.dispatcher, "_handoffs", released)
    source.start(start("a", phase=PHASE_PREFILL))
    source.begin_to_save("a")
    target.start(of(source, start("a")))
    await until(lambda: target.engine.begun == ["a#1"], "it pulls")
    match how:
        case "abort":
            target.dispatcher.abort(["a"])
        case "stream":
            target.dispatcher.disconnect(target.session)
        case _:
            target.start(start("a", epoch=2))
    await followed(source, 0)
    assert target.engine.aborted == ["a#1"]
    assert target.failed() == released == []


async def test_a_source_that_does_not_complete_in_time(source, target):
    source.start(start("a", phase=PHASE_PREFILL))
    decode = of(source, start("a"))
    decode.left_s = 0.1
    target.start(decode)
    failed = await target.failure()
    assert (failed.code, failed.message.partition(":")[0]) == (Failed.CODE_HANDOFF, "SourceTimeout")
    await followed(source, 0)


async def test_a_server_that_accepts_connections_but_never_answers(target, monkeypatch):
    monkeypatch.setattr(following, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target.start(with_kv(start("a"), address=f"127.0.0.1:{silent.getsockname()[1]}"))
        await target.fails(Failed.CODE_SOURCE, "no connection to the source within 0.2 s")


async def test_a_prompt_uses_its_beginning_if_it_arrives_in_time(source, target):
    save = start("b", phase=pb.PHASE_SAVE)
    save.prefix_tokens = 10
    target.start(of(source, start("b", phase=PHASE_PREFILL)))
    source.start(save)
    source.prefilled("b")
    await until(lambda: target.engine.submitted == ["b#1"], "its beginning is there")
    comes = target.dispatcher._attempts.live("b#1").incoming
    assert comes.loads


async def test_a_prompt_does_not_wait_for_a_source_that_refuses(source, target):
    loop = asyncio.get_running_loop()
    save = start("b", phase=pb.PHASE_SAVE)
    save.prefix_tokens = 10
    source.start(save)
    target.start(of(source, start("b", phase=PHASE_PREFILL)))
    await followed(source)
    began = loop.time()
    source.dispatcher.abort(["b"])
    await until(lambda: target.engine.submitted == ["b#1"], "it is computed whole")
    assert loop.time() - began < 0.9 * PATIENCE
    assert target.failed() == []


async def test_the_number_of_channels_is_limited(source, target, monkeypatch):
    channels = target.dispatcher._entrance._following._channels
    monkeypatch.setattr(channels, "_bound", 1)
    for name in "ac":
        target.start(of(source, start(name)))
    await followed(source, 2)
    assert len(channels) == 1  # one for both calls, and in use
    target.dispatcher.abort(["a", "c"])
    await followed(source, 0)
    target.start(with_kv(start("b")))
    await target.failure()
    assert list(channels._kept) == ["127.0.0.1:9"]


async def test_a_renewed_certificate_breaks_no_call(become, monkeypatch):
    """A prompt may be computed for longer than a certificate lives."""
    become(Role.WORKER, "p")
    async with serving() as source:
        become(Role.WORKER, "d")
        async with serving() as target:
            target.start(of(source, start("a")))
            await followed(source)
            calls = target.dispatcher._entrance._following
            monkeypatch.setattr(calls._channels, "_dialler", rpc.Dialler(Role.WORKER))
            become(Role.WORKER, "d")
            monkeypatch.setattr(calls._channels, "_dialler", rpc.Dialler(Role.WORKER))
            target.start(of(source, start("b")))
            await followed(source, 2)
            source.start(start("a", phase=PHASE_PREFILL))
            source.prefilled("a")
            await until(lambda: target.engine.resumed == ["a#1"], "it goes on")
            await until(lambda: len(calls._channels) == 1 and not calls._closing, "the old channel is closed")
            assert target.failed() == []


async def test_a_router_may_not_follow(become):
    become(Role.WORKER, "p")
    async with serving() as source:
        become(Role.ROUTER)
        async with serving() as target:
            target.start(of(source, start("a")))
            await target.fails(Failed.CODE_HANDOFF, "router may not call Worker/Follow")
