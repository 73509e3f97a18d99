"""A worker's start, drain and failures."""

import asyncio
import signal

import psutil

from baton.protos import scheduler_pb2
from baton.protos import worker_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.services.leave import ENGINE_FAILED
from harness import breaking
from harness.support import PATIENCE, eventually, free_port, free_ports, freeze
from harness.workers import START_TIMEOUT_S
from tests.services.worker.router import DECODE, PREFILL, connected, kept, prompt, request

NODE = "baton.services.worker.process"
STALL_S = 8.0  # the first step of two ranks takes 5 s on a busy machine


def second_rank(pid):
    """Return the process of a worker's second rank."""
    (found,) = [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if "VLLM::Worker_TP1" in " ".join(child.cmdline())
    ]
    return found


async def registered(fleet):
    async with SchedulerClient(fleet.scheduler) as client:
        description = await client.describe()
    return {status.identity.worker_id: status for status in description.workers}


async def test_a_ready_worker_is_registered_with_its_capacity(workers, mixed):
    status = (await registered(workers))[mixed.name]
    assert status.state == scheduler_pb2.WORKER_STATE_READY
    assert status.identity.role == scheduler_pb2.ROLE_MIXED
    assert (status.identity.capacity.num_blocks, status.identity.capacity.max_model_len) == (4096, 4000)
    assert len(status.identity.model_fingerprint) == 64
    assert "staging: 64 MiB of shared memory for saved KV (half of the KV cache)" in mixed.text


async def test_a_worker_reports_its_load(workers, mixed):
    async with connected(mixed.address) as stream:
        await stream.start(request("loads", prompt(20), max_tokens=3900), DECODE)
        await stream.some("loads", 1)
        async with asyncio.timeout(10 * PATIENCE):
            while (await registered(workers))[mixed.name].load.running != 1:
                await stream.some("loads", 1)
        await stream.abort("loads")


async def test_a_drain_waits_while_a_rank_does_not_answer(workers):
    """The rank may hold saved KV, and here it does."""
    worker = workers.started("prefill", engine={"tensor_parallel_size": 2})
    async with connected(worker.address) as source:
        assert (await source.run(request("held", prompt(100, seed=22)), PREFILL)).saved is not None
        rank = second_rank(worker.pid)
        freeze(rank.pid)
        try:
            worker.signal(signal.SIGTERM)
            unknown = "no reply from the Handoff services"
            eventually(lambda: worker.text.count(unknown) > 2 or worker.exitcode is not None, 15, "it asks")
            assert worker.exitcode is None
        finally:
            rank.resume()
        await source.abort("held")
        assert worker.ended() == 0
    assert "drained in" in worker.text


async def test_an_operators_drain_waits_for_requests_and_handoffs_and_can_be_undone(workers, mixed):
    worker = workers.started("mixed")
    handed = request("handed over while it drains", prompt(100, seed=20))
    async with connected(worker.address) as source, connected(mixed.address) as target:
        begun = await source.prefill(handed)
        await source.start(request("finishes", prompt(30), max_tokens=1500), DECODE)
        await source.some("finishes", 1)
        async with SchedulerClient(workers.scheduler) as client:
            assert (await client.drain(worker.name)).problem == ""
        eventually(lambda: not worker.serving(), 10, "it drains")  # a heartbeat tells it
        assert len((await source.end("finishes")).tokens) == 1500
        status = (await registered(workers))[worker.name]
        assert status.state == scheduler_pb2.WORKER_STATE_DRAINING
        assert worker.exitcode is None  # the handoff has not been pulled
        rest = await target.run(handed, DECODE, source=source.source(handed))
        assert len(begun.tokens + rest.tokens) == 24
    assert worker.ended() == 0
    assert worker.name not in await registered(workers)
    again = workers.started("mixed", worker={"worker_id": worker.name})
    status = (await registered(workers))[worker.name]
    assert (status.state, status.drained) == (scheduler_pb2.WORKER_STATE_DRAINING, True)
    assert again.exitcode is None
    async with SchedulerClient(workers.scheduler) as client:
        assert (await client.undrain(worker.name)).name == worker.name
        status = (await registered(workers))[worker.name]
        assert (status.state, status.drained) == (scheduler_pb2.WORKER_STATE_READY, False)
    eventually(lambda: "takes requests again" in again.text, 10, "it is undrained")
    again.signal(signal.SIGTERM)
    assert again.ended() == 0
    assert worker.name not in await registered(workers)


async def test_a_worker_changes_its_role_under_load(workers, mixed):
    """Requests and handoffs from before the change continue."""
    worker = workers.started("prefill")
    prefill, decode = scheduler_pb2.ROLE_PREFILL, scheduler_pb2.ROLE_DECODE
    handed = request("handed over across the change", prompt(100, seed=21))
    async with (
        SchedulerClient(workers.scheduler) as client,
        connected(worker.address) as source,
        connected(mixed.address) as target,
    ):
        begun = await source.prefill(handed)
        await source.start(request("goes on", prompt(30), max_tokens=300), DECODE)
        await source.some("goes on", 1)
        assert (await client.set_role(worker.name, decode)).worker_id == worker.name
        status = (await registered(workers))[worker.name]
        assert (status.identity.role, status.state) == (decode, scheduler_pb2.WORKER_STATE_READY)
        assert (await client.set_role(worker.name, decode)).problem == ""  # no change
        late = await source.run(request("placed before", prompt(60)), PREFILL)
        assert late.saved.problem == ""
        rest = await target.run(handed, DECODE, source=source.source(handed))
        assert len(begun.tokens + rest.tokens) == 24
        assert (await client.set_role(worker.name, prefill)).problem == ""
        assert len((await source.end("goes on")).tokens) == 300
        assert (await registered(workers))[worker.name].identity.role == prefill
        assert "no worker's id" in (await client.set_role("nobody", decode)).problem
        await source.start(request("holds it", prompt(30), max_tokens=3900), DECODE)
        await source.some("holds it", 1)
        await source.start(request("finishes", prompt(30), max_tokens=1500), DECODE)
        await source.some("finishes", 1)
        worker.signal(signal.SIGTERM)
        eventually(lambda: not worker.serving(), 10, "it drains")
        assert "it is draining" in (await client.set_role(worker.name, decode)).problem
        assert (await registered(workers))[worker.name].state == scheduler_pb2.WORKER_STATE_DRAINING
        assert len((await source.end("finishes")).tokens) == 1500
        worker.signal(signal.SIGINT)  # a second signal ends it at once
        assert worker.ended(5) == 128 + signal.SIGINT


async def test_a_hung_engine_counts_as_failed(workers):
    """One of two ranks is stopped, so the step never ends."""
    stall = {f"{NODE}:ENGINE_STALL_S": STALL_S}
    worker = workers.started("mixed", constants=stall, engine={"tensor_parallel_size": 2})
    async with connected(worker.address) as stream:
        ranks, second = psutil.Process(worker.pid).children(recursive=True), second_rank(worker.pid)
        freeze(second.pid)
        await stream.start(request("hangs", prompt(30), max_tokens=3900), DECODE)
        got = await stream.end("hangs")
        assert got.failed.code == pb.Failed.CODE_ENGINE
        assert f"longer than {STALL_S:g} s" in got.failed.message
    assert worker.ended() == ENGINE_FAILED
    assert "engine failed" in worker.error
    eventually(lambda: not any(rank.is_running() for rank in ranks), 10, "its ranks have ended")


async def test_a_killed_worker_leaves_no_processes(workers):
    worker = workers.start("mixed")
    eventually(lambda: "loading" in worker.text, 30, "it loads")
    family = psutil.Process(worker.pid).children(recursive=True)
    assert any(one.cmdline()[0].startswith("baton: grammars of process") for one in family)
    worker.signal(signal.SIGKILL)
    assert worker.ended() == -signal.SIGKILL
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


async def test_a_signal_during_loading(workers):
    worker = workers.start("mixed")
    eventually(lambda: "loading" in worker.text, 30, "it loads")
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0
    assert worker.name not in await registered(workers)


async def test_a_worker_survives_a_step_that_fails_and_a_drain_that_times_out_returns_requests(workers):
    worker = workers.started("decode", engine=breaking.ENGINE, worker={"drain_timeout_s": 0.3})
    async with connected(worker.address) as stream:
        await stream.start(request("innocent", prompt(30), max_tokens=3900), DECODE)
        # At once, so that both are in the step.
        await stream.start(request("poison", prompt(30), extra_args=breaking.ASKING), DECODE)
        for name in ("innocent", "poison"):
            got = await stream.end(name)
            assert got.failed.code == pb.Failed.CODE_ENGINE
            assert got.failed.engine_goes_on
        await stream.start(request("later", prompt(30), max_tokens=20), DECODE)
        assert len((await stream.end("later")).tokens) == 20
        await stream.start(request("long", prompt(30), max_tokens=3900), DECODE)
        await stream.some("long", 1)
        worker.signal(signal.SIGTERM)
        assert (await stream.end("long")).failed.code == pb.Failed.CODE_DRAINING
        assert worker.ended() == 0
    assert "in the step that failed: poison#1: prompt of 30 tokens" in worker.text


async def test_a_worker_that_listens_on_all_addresses_advertises_one(workers, mixed):
    """Its KV is served there too, on the configured port."""
    port, kv_port = free_port(), free_ports()
    worker = workers.start(
        "prefill",
        worker={"listen": f"0.0.0.0:{port}"},
        handoff={"transports": ["tcp"], "listen": f"127.0.0.1:{kv_port}"},
        security={"insecure": True},
    )
    eventually(lambda: "ready on" in worker.text, START_TIMEOUT_S, "the worker is ready")
    identity = (await registered(workers))[worker.name].identity
    assert identity.address == f"127.0.0.1:{port}"  # because the scheduler is on this machine
    handed = request("kv by its address", prompt(100, seed=22))
    async with connected(identity.address) as source, connected(mixed.address) as target:
        await source.prefill(handed)
        manifest = (await kept(source.source(handed))).manifest
        assert [shard.address for shard in manifest.shards] == [f"127.0.0.1:{kv_port}"]
        rest = await target.run(handed, DECODE, source=source.source(handed))
        assert rest.admitted.transport == "tcp"
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0


def test_a_taken_kv_port_is_an_error(workers, mixed):
    taken = int(mixed.address.rpartition(":")[2])
    worker = workers.start("decode", handoff={"listen": f"127.0.0.1:{taken}"})
    assert worker.ended() == 1
    either = taken, taken + 1  # the second one is the other worker's metrics port
    assert any(f"127.0.0.1:{port}" in worker.error for port in either)
    assert "handoff.listen" in worker.error
