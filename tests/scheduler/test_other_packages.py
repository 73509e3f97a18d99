"""Test that a scheduler process places requests with a scorer from another package."""

import json
import os
import signal
import subprocess

import pytest

from baton.prefix_keys import PromptKeys
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from harness.packages import install
from harness.scheduling import identity, need
from harness.support import BATON, PATIENCE, ROOT, eventually, free_port, listening

PACKAGE = ROOT / "tests" / "plugins" / "baton-affinity"
POLICY = {"scorers": {"prefix_affinity": 1.0}, "picker": "best"}
PREFIXES = [number * 0x0101_0101_0101 for number in range(24)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the folder where pip installed the package."""
    return install(PACKAGE, tmp_path_factory.mktemp("package"))


def command(address):
    return [str(BATON), "scheduler", "--scheduler", address, "--policy", json.dumps(POLICY)]


@pytest.fixture
def address(installed):
    """Return the address of a scheduler that uses the package's scorer."""
    port = free_port()
    path = os.pathsep.join([str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    process = subprocess.Popen(command(f"127.0.0.1:{port}"), env={**os.environ, "PYTHONPATH": path})
    try:
        eventually(lambda: listening(port), 20, "the scheduler listens")
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20 * PATIENCE) == 0


async def place(client, request_id, prefix):
    """Place and finish a request; return its prefill worker."""
    asked = need(request_id, 1, 20, 1, router_id="router", prefix=PromptKeys((prefix, len(request_id)), 10))
    placement = await client.place(asked)
    client.reports.finished(placement.attempt, "stop")
    assert placement.prefill
    return placement.prefill.worker_id


async def test_prompts_with_the_same_prefix_go_to_the_same_worker(address):
    async with SchedulerClient(address, router_id="router") as client:
        for name, role in (("p1", pb.ROLE_PREFILL), ("p2", pb.ROLE_PREFILL), ("d", pb.ROLE_DECODE)):
            who = identity(name, role, max_num_seqs=100, num_blocks=10_000)
            await client.register(who, pb.WORKER_STATE_READY)
        first = [await place(client, f"first-{prefix}", prefix) for prefix in PREFIXES]
        again = [await place(client, f"again-{prefix}", prefix) for prefix in PREFIXES]
        assert first == again
        assert set(first) == {"p1", "p2"}
