"""No call fails under load while certificates are replaced every few seconds."""

import asyncio
import threading
import time
import uuid
from contextlib import ExitStack, closing
from datetime import UTC, datetime

from cryptography import x509

from baton import rpc
from baton.handoff.channels import HandoffClient
from baton.handoff.transports.tcp import Tcp
from baton.protos import scheduler_pb2 as pb
from baton.protos.handoff_pb2 import Manifest
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.security.names import Role
from baton.security.renewal import Renewal
from harness.scheduling import Options, identity, place
from harness.support import PATIENCE
from tests.handoff.server import KEY, Rank
from tests.security.conftest import TOPIC

LIFE_S = 2.0 * PATIENCE
ROTATIONS = 2
PACE_S = 0.03


def serial(mine):
    return x509.load_pem_x509_certificate(mine.current().pems.chain).serial_number


async def test_no_call_fails_while_certificates_are_replaced(become, ca, monkeypatch):
    monkeypatch.setattr(rpc, "RETIRED_S", 1.0)  # streams on old channels are cut during the test

    def renew(last):
        return ca.issue(last.name, LIFE_S)

    with ExitStack() as stack:

        def kept(role, worker_id=""):
            mine = become(role, worker_id, life_s=LIFE_S)
            stack.callback(Renewal(mine, renew).close)
            return mine

        scheduler = kept(Role.SCHEDULER)
        server = SchedulerServer(Options(topic=TOPIC))
        async with server:
            prefill = kept(Role.WORKER, "p0")
            rank = stack.enter_context(closing(Rank()))
            rank.save(4)
            decode = kept(Role.WORKER, "d0")
            tcp, client = (stack.enter_context(closing(made())) for made in (Tcp, HandoffClient))
            worker = await _client(server)
            await worker.register(identity("d0"), pb.WORKER_STATE_READY)
            router_identity = kept(Role.ROUTER)
            router = await _client(server)
            parts = [scheduler, prefill, decode, router_identity]
            seen = [set() for _ in parts]
            over = threading.Event()

            def note():
                for mine, serials in zip(parts, seen, strict=True):
                    serials.add(serial(mine))
                    assert mine.current().ends > datetime.now(UTC)
                return all(len(serials) > ROTATIONS for serials in seen)

            async def placed():
                one = await place(router, uuid.uuid4().hex, 1, 1, 1)
                router.reports.finished(one.attempt, "stop")

            calls = await asyncio.gather(
                _repeated(lambda: worker.heartbeat("d0", pb.WORKER_STATE_READY, pb.WorkerLoad(), 0), over),
                _repeated(router.refresh, over),
                _repeated(placed, over),
                asyncio.to_thread(_pulled, rank, tcp, client, over),
                _until(note, over),
            )
            await worker.close()
            await router.close()
    print(f"{calls[:4]} calls, {[len(serials) for serials in seen]} certificates")
    assert all(count > 20 for count in calls[:4])


async def _client(server):
    return SchedulerClient(server.address, router_id="r")


async def _repeated(call, over):
    """Call until it is over; return the number of calls."""
    count = 0
    while not over.is_set():
        await call()
        count += 1
        await asyncio.sleep(PACE_S)
    return count


def _pulled(rank, tcp, client, over):
    count = 0
    manifest = Manifest(request_id="r", epoch=1, shards=[rank.pull().shard])
    while not over.wait(PACE_S / 3):
        assert sum(records.data.sum() for records in tcp.pull(rank.pull())) == rank.data.sum()
        assert client.renew([manifest]) == {KEY}
        count += 1
    return count


async def _until(done, over):
    deadline = time.monotonic() + ROTATIONS * LIFE_S * 2
    try:
        while not done():
            assert time.monotonic() < deadline, "the certificates were not replaced"
            await asyncio.sleep(0.02)
    finally:
        over.set()
    return 0
