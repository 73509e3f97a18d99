"""`baton ray up` with autoscaling, on a Ray cluster whose autoscaler adds and removes nodes.

Under load the scheduler orders a decode worker that fits on no node: Ray adds a node and the worker serves.
Without load it drains, and the node goes. Takes about 85 CPU seconds.
`WHOLE_TABLE=1 make test ARGS=tests/e2e/test_ray_autoscale.py` runs it.
"""

import asyncio
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest
import yaml

from baton.services.fleet.goals import DOWN_AFTER_S
from harness.deployment import ENGINE, MODEL_NAME
from harness.ray_head import RayCluster, ray_autoscaler
from harness.support import BATON, CALL_S, ROOT, eventually, free_port, ran, running

STREAMS = 8  # twice one worker's slots
TOKENS = 200

pytestmark = pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="set WHOLE_TABLE: it takes long")


@dataclass
class Up:
    """`baton ray up` on a cluster whose head has room for the first two workers only."""

    cluster: RayCluster
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self):
        return self.log.read_text()

    def baton(self, *command):
        address = ("--address", self.cluster.address)
        return ran(BATON, "ray", *command, *address, env=self.cluster.environment)

    @property
    def nodes(self):
        commands = (one.info["cmdline"] or [""] for one in psutil.process_iter(["cmdline"]))
        return sum(
            command[0].endswith("/raylet") and any(str(self.cluster.folder) in word for word in command)
            for command in commands
        )


@pytest.fixture
def up(tmp_path):
    port = free_port()
    side = {
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        "deployment_config": {
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
        },
    }
    config = {
        "engine": {**ENGINE, "max_num_seqs": 4},
        "scheduler": {"worker_lease_s": 2.0},
        "router": {"port": port},
        "handoff": {"staging_mib": 64},
        "security": {"ca": str(tmp_path / "ca")},
        "autoscale": {"mode": "on"},
        "prefill_config": {**side, "deployment_config": {"autoscaling_config": {"max_replicas": 1}}},
        "decode_config": side,
    }
    file, log = tmp_path / "cluster.yaml", tmp_path / "up.log"
    file.write_text(yaml.safe_dump(config))
    with ray_autoscaler(tmp_path, nodes=1, head_cpus=2) as cluster:
        command = [BATON, "ray", "up", file, "--log-dir", tmp_path / "logs", "--address", cluster.address]
        options = {"env": cluster.environment, "cwd": ROOT}
        with running(command, lambda: "\nReady." in log.read_text(), 120, log, **options) as process:
            yield Up(cluster, process, log)


@pytest.mark.timeout(600)
async def test_a_worker_comes_on_a_new_node_and_goes_with_it(up):
    assert up.nodes == 1
    assert re.search(r"settings +ignored: .*: decode_config\..*\.target_ongoing_requests\n", up.text)
    stop = asyncio.Event()
    answers = []

    async def one_after_another(client):
        while not stop.is_set():
            answer = await client.completions.create(
                model=MODEL_NAME, prompt="def main(", max_tokens=TOKENS, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            answers.append(answer.usage.completion_tokens)

    url = re.search(r"served at (\S+)", up.text)
    assert url is not None
    async with openai.AsyncOpenAI(base_url=url[1], api_key="none", timeout=CALL_S, max_retries=0) as client:
        load = [asyncio.create_task(one_after_another(client)) for _ in range(STREAMS)]

        def serves():
            if over := next((task for task in load if task.done()), None):
                raise AssertionError("a request failed") from over.exception()
            return bool(re.search(r"worker-2 +ready: ", up.text))

        await asyncio.to_thread(eventually, serves, 100, "a second decode worker serves")
        assert up.nodes == 2
        monitor = up.cluster.folder / "session_latest" / "logs" / "monitor.log"
        assert re.search(r"From request_resources:\s+\{'CPU': 1\.0\}: 3", monitor.read_text())
        status = await asyncio.to_thread(up.baton, "status")
        assert "wanted (chosen by the scheduler): 1 prefill, 2 decode" in status.stdout
        refused = await asyncio.to_thread(up.baton, "scale", "decode=1")
        assert refused.returncode == 1
        assert refused.stderr.startswith("baton: error: the scheduler chooses the numbers of workers")
        stop.set()
        await asyncio.gather(*load)
    print(f"{len(answers)} answers")
    assert set(answers) == {TOKENS}  # all are complete

    await asyncio.to_thread(
        eventually,
        lambda: re.search(r"worker-2 +has left", up.text),
        DOWN_AFTER_S + 40,
        "it drains and leaves",
    )
    await asyncio.to_thread(eventually, lambda: up.nodes == 1, 40, "its node goes")
    assert "died" not in up.text
    assert "decode-0     is drained" not in up.text
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(CALL_S) == 0, up.text
