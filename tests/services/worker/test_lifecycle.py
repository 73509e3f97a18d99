"""A worker's start, drain and failures."""

import signal

import psutil

from baton.protos import scheduler_pb2
from baton.protos import worker_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.services.leave import ENGINE_FAILED
from harness.support import eventually, free_port, free_ports
from harness.workers import START_TIMEOUT_S
from tests.services.worker.router import DECODE, PREFILL, connected, kept, prompt, request

NODE = "baton.services.worker.node"
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


async def test_a_drain_waits_while_a_rank_does_not_answer(workers):
    """The rank may hold saved KV, and here it does."""
    worker = workers.started("prefill", engine={"tensor_parallel_size": 2})
    async with connected(worker.address) as source:
        assert (await source.run(request("held", prompt(100, seed=22)), PREFILL)).saved is not None
        rank = second_rank(worker.pid)
        rank.suspend()
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


async def test_an_operators_drain_waits_for_requests_and_handoffs(workers, mixed):
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
        assert worker.exitcode is None  # the handoff has not been pulled
        rest = await target.run(handed, DECODE, source=source.source(handed))
        assert len(begun.tokens + rest.tokens) == 24
    assert worker.ended() == 0
    assert worker.name not in await registered(workers)


async def test_a_draining_worker_keeps_its_role_and_a_second_signal_ends_it(workers):
    worker, decode = workers.started("prefill"), scheduler_pb2.ROLE_DECODE
    async with SchedulerClient(workers.scheduler) as client, connected(worker.address) as source:
        assert (await client.set_role(worker.name, decode)).worker_id == worker.name
        assert (await client.set_role(worker.name, decode)).problem == ""  # no change
        late = await source.run(request("placed before", prompt(60)), PREFILL)
        assert late.saved.problem == ""
        await source.start(request("holds it", prompt(30), max_tokens=3900), DECODE)
        await source.some("holds it", 1)
        worker.signal(signal.SIGTERM)
        eventually(lambda: not worker.serving(), 10, "it drains")
        refused = await client.set_role(worker.name, scheduler_pb2.ROLE_PREFILL)
        assert "it is draining" in refused.problem
        worker.signal(signal.SIGINT)
        assert worker.ended(5) == 128 + signal.SIGINT


async def test_a_hung_engine_counts_as_failed(workers):
    """One of two ranks is stopped, so the step never ends."""
    stall = {f"{NODE}:ENGINE_STALL_S": STALL_S}
    worker = workers.started("mixed", constants=stall, engine={"tensor_parallel_size": 2})
    async with connected(worker.address) as stream:
        ranks, second = psutil.Process(worker.pid).children(recursive=True), second_rank(worker.pid)
        second.suspend()
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
