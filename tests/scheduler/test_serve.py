"""The scheduler's process: failures at the start, metrics, and SIGTERM."""

import asyncio
import json
import signal
import urllib.request

import pytest
from grpc_health.v1 import health_pb2
from prometheus_client import REGISTRY

from baton.metrics import CannotServe
from baton.scheduler.errors import ListenFailed, StoreRefuses
from baton.scheduler.service import SchedulerServer, serve
from harness.scheduling import Options, free_port
from harness.support import PATIENCE
from tests.scheduler.conftest import scheduler_process
from tests.scheduler.test_service import health


async def test_a_port_in_use():
    async with SchedulerServer(Options()) as first:
        with pytest.raises(ListenFailed, match=f"cannot listen on {first.address}: the port is taken"):
            async with SchedulerServer(Options(address=first.address)):
                pass


async def test_a_wrong_store_password_stops_the_start(redis_server):
    url = redis_server.url.replace("s3cret", "wr0ng")
    with pytest.raises(StoreRefuses, match="refused the password") as caught:
        async with SchedulerServer(Options(store=url)):
            pass
    assert "wr0ng" not in str(caught.value)


async def test_serve_reports_its_address_and_serves_metrics():
    stop, started = asyncio.Event(), asyncio.Event()
    addresses = []
    port = free_port()

    def on_started(address):
        addresses.append(address)
        started.set()

    running = asyncio.create_task(serve(Options(), metrics_port=port, on_started=on_started, stop=stop))
    async with asyncio.timeout(5 * PATIENCE):
        await started.wait()
    assert await health(addresses[0]) == health_pb2.HealthCheckResponse.SERVING

    def scrape(what="metrics"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{what}", timeout=5) as reply:
            return str(reply.read().decode())

    text = await asyncio.to_thread(scrape)
    for name in ("placements", "rejections", "stale_epochs", "leases_expired", "live_attempts"):
        assert f"baton_scheduler_{name}" in text
    assert "baton_scheduler_live_attempts" not in {
        family.name for family in REGISTRY.collect()
    }  # our own registry
    targets = json.loads(await asyncio.to_thread(scrape, "targets"))
    assert targets == [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": addresses[0], "role": "scheduler"}}
    ]
    with pytest.raises(CannotServe, match=f"metrics_port: metrics cannot be served on 127.0.0.1:{port}"):
        await serve(Options(), metrics_port=port, stop=stop)
    stop.set()
    async with asyncio.timeout(5 * PATIENCE):
        await running


async def test_serve_ends_on_sigterm():
    async with scheduler_process() as (process, address), asyncio.timeout(20 * PATIENCE):
        assert await health(address) == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
