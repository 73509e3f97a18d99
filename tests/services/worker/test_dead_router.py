"""A router dies, or hangs with open connections: its saved KV is released and its requests end."""

import asyncio
import signal

import pytest

from harness import breaking, zygote
from harness.support import CALL_S, eventually
from tests.services.worker.router import DECODE, PINNED, PREFILL, connected, prompt, request

RUNNING = "baton_worker_requests_running"
HUNG_S = 20.0  # longer than gRPC's keepalive, shorter than a lease of saved KV


@pytest.fixture(scope="module")
def mixed(workers):
    """Start a worker whose request lasts for minutes and computes little."""
    return workers.started("mixed", engine=breaking.ENGINE)


@pytest.mark.parametrize(
    ("how", "within_s"), [(signal.SIGKILL, 3.0), (signal.SIGSTOP, HUNG_S)], ids=["dead", "hung"]
)
def test_requests_and_handoffs_of_a_lost_router_end(prefill, mixed, tmp_path, how, within_s):
    router = zygote.shared().start(
        "router", f"{__name__}:run", tmp_path, prefill=prefill.address, mixed=mixed.address, name=how.name
    )
    try:
        eventually(lambda: "both" in router.text, CALL_S, "it holds both")
        assert prefill.figure(PINNED) == 1
        assert mixed.figure(RUNNING) == 1
        router.send_signal(how)
        eventually(lambda: prefill.figure(PINNED) == 0, within_s, "the handoff is released")
        eventually(lambda: mixed.figure(RUNNING) == 0, within_s, "the request ends")
    finally:
        router.kill()


def run(**held):
    asyncio.run(hold(**held))


async def hold(prefill, mixed, name):
    """Leave a handoff on one worker and a running request on the other, and wait."""
    async with connected(prefill) as source, connected(mixed) as target:
        await source.run(request(f"{name} kept", prompt(100, seed=41)), PREFILL)
        long = request(f"{name} runs", prompt(20, seed=42), max_tokens=3900, extra_args=breaking.SLOW)
        await target.start(long, DECODE)
        await target.some(long.request_id, 2)
        print("both", flush=True)
        await asyncio.sleep(60)
