"""Workers' cache reports, from a heartbeat to the next placement, over gRPC."""

import uuid

from baton.block_log import BlockLog, Change
from baton.prefix_keys import PromptKeys, key_of
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.service import SchedulerServer
from harness.scheduling import Options, identity, place, until, until_told

P, D = pb.ROLE_PREFILL, pb.ROLE_DECODE
KEYS = tuple(key_of(number << 32, number) for number in range(1, 7))


async def beat(client, worker_id, log):
    reply = await client.heartbeat(worker_id, pb.WORKER_STATE_READY, pb.WorkerLoad(), blocks=log.message())
    log.heard(reply.blocks)


async def placed(client):
    """Place 100 tokens, 96 of them in KEYS; return the prefill worker and its booked tokens."""
    placement = await place(client, uuid.uuid4().hex, 1, 100, 1, prefix=PromptKeys(KEYS, 16))
    name = placement.prefill.worker_id
    workers = {one.identity.worker_id: one for one in (await client.describe()).workers}
    client.reports.finished(placement.attempt, "stop")
    await until_told(client, lambda told: not told.attempts)
    return name, workers[name].reserved_prompt_tokens


async def test_a_prompt_goes_to_the_worker_that_reported_its_blocks(server, client):
    """A restarted worker with the same id holds nothing."""
    log = BlockLog()
    log.take(Change(stored=KEYS))
    for name, role in (("d", D), ("p1", P), ("p2", P)):
        await client.register(identity(name, role), pb.WORKER_STATE_READY)
    for name in ("p1", "d"):
        await beat(client, name, BlockLog())
    await beat(client, "p2", log)

    async def held():
        return await placed(client) == ("p2", 4)

    await until(held)
    figures = server.metrics.registry.get_sample_value
    assert figures("baton_scheduler_prefix_placements_total", {"holds": "some"})
    assert figures("baton_scheduler_prefix_tokens_total")
    await beat(client, "p2", BlockLog())

    async def empty():
        return (await placed(client))[1] == 100

    await until(empty)
    assert figures("baton_scheduler_prefix_placements_total", {"holds": "nothing"})


async def test_a_report_is_kept_until_the_next_heartbeat(monkeypatch):
    ledger = SchedulerServer(Options(heartbeat_s=60.0, worker_lease_s=300.0))._servicer.prefixes
    now = 100.0
    monkeypatch.setattr(ledger, "_clock", lambda: now)
    ledger.hear("w", BlockLog().message())
    now += 61.0
    ledger.keep({"w": P})
    assert "w" in ledger


async def test_reports_of_unregistered_workers_are_ignored(client):
    log = BlockLog()
    log.take(Change(stored=KEYS))
    reply = await client.heartbeat("w", pb.WORKER_STATE_READY, pb.WorkerLoad(), blocks=log.message())
    assert not reply.known
    assert not reply.HasField("blocks")
