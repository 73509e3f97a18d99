"""A worker's start, drain and failures."""

import asyncio
import signal

import psutil
import pytest

from baton.protos import worker_pb2 as pb
from baton.protos.scheduler_pb2 import ROLE_DECODE, ROLE_MIXED, ROLE_PREFILL
from baton.protos.scheduler_pb2 import WORKER_STATE_DRAINING as DRAINING
from baton.protos.scheduler_pb2 import WORKER_STATE_READY as READY
from baton.scheduler.client import SchedulerClient
from baton.services.leave import ENGINE_FAILED
from harness import breaking
from harness.support import PATIENCE, eventually, free_port, free_ports, freeze
from harness.workers import START_TIMEOUT_S
from tests.services.worker.router import DECODE, PREFILL, connected, kept, prompt, request

NODE = "baton.services.worker.process"
STALL_S = 2.0  # the only step is the one that hangs


def second_rank(pid):
    """Return the process of a worker's second rank."""
    family = psutil.Process(pid).children(recursive=True)
    (found,) = [child for child in family if "VLLM::Worker_TP1" in " ".join(child.cmdline())]
    return found


def slow(name, tokens):
    """Return a request that takes breaking.STEP_S for each token."""
    return request(name, prompt(30), max_tokens=tokens, extra_args=breaking.SLOW)


async def registered(worker):
    """Return what the scheduler knows of a worker; None if it is not registered."""
    async with SchedulerClient(worker.scheduler) as client:
        found = {one.identity.worker_id: one for one in (await client.describe()).workers}
    return found.get(worker.name)


async def test_a_ready_worker_is_registered_with_its_capacity(mixed):
    status = await registered(mixed)
    assert status.state == READY
    assert status.identity.role == ROLE_MIXED
    assert (status.identity.capacity.num_blocks, status.identity.capacity.max_model_len) == (4096, 4000)
    assert len(status.identity.model_fingerprint) == 64
    assert "staging: 64 MiB of shared memory for saved KV (half of the KV cache)" in mixed.text


async def test_a_worker_reports_its_load(mixed, target):
    await target.start(request("loads", prompt(20), max_tokens=3900), DECODE)
    await target.some("loads", 1)
    async with asyncio.timeout(10 * PATIENCE):
        while (await registered(mixed)).load.running != 1:
            await target.some("loads", 1)
    await target.abort("loads")


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


async def test_an_operators_drain_waits_for_requests_and_handoffs_and_can_be_undone(workers, target):
    worker = workers.started("mixed", engine=breaking.ENGINE)
    handed = request("handed over while it drains", prompt(100, seed=20))
    async with connected(worker.address) as source:
        begun = await source.prefill(handed)
        await source.start(slow("finishes", 60), DECODE)
        await source.some("finishes", 1)
        async with SchedulerClient(workers.scheduler) as client:
            assert (await client.drain(worker.name)).problem == ""
        eventually(lambda: not worker.serving(), 10, "it drains")  # a heartbeat tells it
        assert worker.figure("baton_worker_requests_running") == 1
        assert len((await source.end("finishes")).tokens) == 60
        assert (await registered(worker)).state == DRAINING
        assert worker.exitcode is None  # the handoff has not been pulled
        rest = await target.run(handed, DECODE, source=source.source(handed))
        assert len(begun.tokens + rest.tokens) == 24
    assert worker.ended() == 0
    assert await registered(worker) is None
    again = workers.started("mixed", worker={"worker_id": worker.name})
    status = await registered(worker)
    assert (status.state, status.drained) == (DRAINING, True)
    assert again.exitcode is None
    async with SchedulerClient(workers.scheduler) as client:
        assert (await client.undrain(worker.name)).name == worker.name
        status = await registered(worker)
        assert (status.state, status.drained) == (READY, False)
    eventually(lambda: "takes requests again" in again.text, 10, "it is undrained")
    again.signal(signal.SIGTERM)
    assert again.ended() == 0
    assert await registered(worker) is None


async def test_a_worker_changes_its_role_under_load(workers, target):
    """Requests and handoffs from before the change continue."""
    worker = workers.started("prefill", engine=breaking.ENGINE, worker={"drain_timeout_s": 300})
    handed = request("handed over across the change", prompt(100, seed=21))
    async with SchedulerClient(workers.scheduler) as client, connected(worker.address) as source:
        begun = await source.prefill(handed)
        await source.start(slow("goes on", 20), DECODE)
        await source.some("goes on", 1)
        assert (await client.set_role(worker.name, ROLE_DECODE)).worker_id == worker.name
        status = await registered(worker)
        assert (status.identity.role, status.state) == (ROLE_DECODE, READY)
        assert (await client.set_role(worker.name, ROLE_DECODE)).problem == ""  # no change
        late = await source.run(request("placed before", prompt(60)), PREFILL)
        assert late.saved.problem == ""
        rest = await target.run(handed, DECODE, source=source.source(handed))
        assert len(begun.tokens + rest.tokens) == 24
        assert (await client.set_role(worker.name, ROLE_PREFILL)).problem == ""
        assert len((await source.end("goes on")).tokens) == 20
        assert (await registered(worker)).identity.role == ROLE_PREFILL
        assert "no worker's id" in (await client.set_role("nobody", ROLE_DECODE)).problem
        await source.start(slow("holds it", 3900), DECODE)
        await source.some("holds it", 1)
        await source.start(slow("finishes", 60), DECODE)
        await source.some("finishes", 1)
        worker.signal(signal.SIGTERM)
        eventually(lambda: not worker.serving(), 10, "it drains")
        assert worker.figure("baton_worker_requests_running") == 2
        assert "it is draining" in (await client.set_role(worker.name, ROLE_DECODE)).problem
        assert (await registered(worker)).state == DRAINING
        assert len((await source.end("finishes")).tokens) == 60
        worker.signal(signal.SIGINT)  # a second signal ends it at once
        assert worker.ended(5) == 128 + signal.SIGINT


async def test_a_hung_engine_counts_as_failed(workers):
    """One of two ranks is stopped, so the step never ends."""
    stall = {f"{NODE}:ENGINE_STALL_S": STALL_S}
    worker = workers.started("mixed", constants=stall, engine={"tensor_parallel_size": 2})
    async with connected(worker.address) as stream:
        ranks, second = psutil.Process(worker.pid).children(recursive=True), second_rank(worker.pid)
        freeze(second.pid)
        got = await stream.run(request("hangs", prompt(30), max_tokens=3900), DECODE)
        assert f"longer than {STALL_S:g} s" in got.failure(pb.Failed.CODE_ENGINE)
    assert worker.ended() == ENGINE_FAILED
    assert "engine failed" in worker.error
    eventually(lambda: not any(rank.is_running() for rank in ranks), 10, "its ranks have ended")


@pytest.mark.parametrize(("how", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)])
async def test_a_worker_that_ends_while_it_loads_leaves_no_processes(workers, how, status):
    worker = workers.start("mixed")
    eventually(lambda: "loading" in worker.text, 30, "it loads")

    def compiles():
        commands = [one.cmdline() for one in psutil.Process(worker.pid).children(recursive=True)]
        return any(command and command[0].startswith("baton: grammars of process") for command in commands)

    eventually(compiles, 10, "a process compiles grammars")
    family = psutil.Process(worker.pid).children(recursive=True)
    worker.signal(how)
    assert worker.ended() == status
    assert how == signal.SIGKILL or await registered(worker) is None
    _, alive = psutil.wait_procs(family, timeout=10 * PATIENCE)
    assert alive == []


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
        assert len((await stream.run(request("later", prompt(30), max_tokens=20), DECODE)).tokens) == 20
        await stream.start(request("long", prompt(30), max_tokens=3900), DECODE)
        await stream.some("long", 1)
        worker.signal(signal.SIGTERM)
        assert (await stream.end("long")).failed.code == pb.Failed.CODE_DRAINING
        assert worker.ended() == 0
    assert "in the step that failed: poison#1: prompt of 30 tokens" in worker.text


async def test_a_worker_that_listens_on_all_addresses_advertises_one(workers, target):
    """Its KV is served there too, on the configured port."""
    port, kv_port = free_port(), free_ports()
    worker = workers.start(
        "prefill",
        worker={"listen": f"0.0.0.0:{port}"},
        handoff={"transports": ["tcp"], "listen": f"127.0.0.1:{kv_port}"},
        security={"insecure": True},
    )
    eventually(lambda: "ready on" in worker.text, START_TIMEOUT_S, "the worker is ready")
    identity = (await registered(worker)).identity
    assert identity.address == f"127.0.0.1:{port}"  # because the scheduler is on this machine
    handed = request("kv by its address", prompt(100, seed=22))
    async with connected(identity.address) as source:
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
