"""`baton ray up` on two hosts: Ray on both, prefill on one, decode on the other, and one of them dies.

The hosts are those of harness/netns.py, each with an address, process ids, a host name, a /dev/shm and, here,
a core of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from harness.deployment import ENGINE, MODEL_NAME
from harness.netns import Host, Network, why_not
from harness.prompts import prompts
from harness.support import BATON, CALL_S, PYTHON, ROOT, eventually

GCS_PORT = 6379
EVERY = 3  # one in so many prompts is used
MAX_TOKENS = 16
LONG = 300  # tokens of the answer during which a host dies
START_S = 200.0
COMMON = (
    "--block",
    "--num-cpus=1",
    "--object-store-memory=80000000",
    "--disable-usage-stats",
)
# Of a local user's own: without RAY_AUTH_MODE Ray would write a token into the home folder.
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}


@dataclass
class Hosts:
    """The two hosts, and `baton ray up` on the first."""

    network: Network
    first: Host
    second: Host
    up: subprocess.Popen[bytes]
    output: Path
    environment: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://{self.first.address}:8000"

    @property
    def ray_address(self) -> str:
        return f"{self.first.address}:{GCS_PORT}"

    def baton(self, *command: str) -> str:
        """Run a command on the first host, and return what it prints."""
        done = self.first.run([str(BATON), *command], CALL_S, env=self.environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, prompt: list[int], max_tokens: int = MAX_TOKENS) -> Any:
        with self.network.inside():
            return answer(self.url, prompt, max_tokens)


def answer(url: str, prompt: list[int], max_tokens: int = MAX_TOKENS) -> Any:
    """Return (token ids, finish reason, prompt tokens, completion tokens)."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    data = json.dumps({**body, "return_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=CALL_S) as reply:
        done = json.loads(reply.read())
    (choice,), usage = done["choices"], done["usage"]
    return choice["token_ids"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


def stream(url: str, prompt: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the token ids of an answer as they come."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    data = json.dumps({**body, "return_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=CALL_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                yield event["choices"][0]["token_ids"]


def cluster_file(folder: Path) -> Path:
    """Write cluster.yaml: prefill on the host labelled `first`, decode on the other."""
    sides = {
        f"{role}_config": {
            "label_selector": {"host": host},
            "placement_group_config": {"bundles": [{"CPU": 1}]},
            "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        }
        for role, host in (("prefill", "first"), ("decode", "second"))
    }
    own = {
        "engine": ENGINE,
        "scheduler": {"heartbeat_s": 0.2, "worker_lease_s": 2.0},
        "handoff": {"staging_mib": 64},
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({**own, **sides}))
    return path


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if why := why_not():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("ray-hosts")
    environment = {**os.environ, **RAY, "BATON_SECURITY__CA": str(folder / "ca")}
    ray = str(PYTHON.with_name("ray"))
    with Network(folder) as network:

        def start(name: str, core: int, *options: str) -> Host:
            pinned = ["taskset", "--cpu-list", str(core), ray, "start"]
            command = [*pinned, *COMMON, f"--labels=host={name}", *options]
            # Sockets in Ray's folder must have short names, and their host's alone.
            setup = "mount -t tmpfs tmpfs /run; mkdir /run/ray"
            return network.host(name, command, env=environment, cwd=ROOT, shm_mib=512, setup=setup)

        cores = sorted(os.sched_getaffinity(0))
        head = ("--head", f"--port={GCS_PORT}", "--temp-dir=/run/ray", "--include-dashboard=false")
        first = start("first", cores[0], *head)

        def answers() -> bool:
            with network.inside(), suppress(OSError), socket.create_connection((first.address, GCS_PORT), 1):
                return True
            return False

        eventually(answers, 60, "Ray's head answers")
        second = start("second", cores[-1], f"--address={first.address}:{GCS_PORT}")
        output = folder / "up.log"
        with output.open("wb") as out:
            command = [str(BATON), "ray", "up", str(cluster_file(folder)), "--log-dir", str(folder / "logs")]
            command += ["--address", f"{first.address}:{GCS_PORT}"]
            up = first.start(command, env=environment, cwd=ROOT, out=out)
        one = Hosts(network, first, second, up, output, environment)

        def ready() -> bool:
            assert up.poll() is None, output.read_text()
            assert second.process.poll() is None, second.text
            return "\nReady." in output.read_text()

        eventually(ready, START_S, f"baton ray up is ready; {output}")
        yield one


@pytest.mark.timeout(400)
def test_greedy_answers_equal_those_of_one_engine(hosts: Hosts, reference: str) -> None:
    """KV goes from host to host by gRPC with TLS, and drafts by the model's own layer are on."""
    asked = prompts()[::EVERY][:20]
    assert len(asked) == 20
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(hosts.ask, asked))
        expected = list(pool.map(lambda prompt: answer(reference, prompt), asked))
    print(f"{sum(one == other for one, other in zip(got, expected, strict=True))} of {len(got)} equal")
    assert got == expected
    assert len({tuple(one[0]) for one in expected}) > 10  # the model's answers do differ


@pytest.mark.timeout(200)
def test_who_runs_where(hosts: Hosts) -> None:
    told = json.loads(hosts.baton("ray", "status", "--json", "--address", hosts.ray_address))
    where = {part["name"]: (part["node"], part["state"]) for part in told["parts"]}
    assert where == {
        "prefill-0": ("first", "ready"),
        "decode-0": ("second", "ready"),
        "router-0": ("first", "ready"),
    }
    # The command that it prints
    look = re.search(r"requests and load: +baton (.*)", hosts.output.read_text())
    assert look is not None
    assert told["scheduler"] in look[1]
    status = json.loads(hosts.baton(*look[1].split(), "--json"))
    found = {one["identity"]["name"]: one["identity"]["address"] for one in status["workers"]}
    assert found["prefill-0"].startswith(f"{hosts.first.address}:")
    assert found["decode-0"].startswith(f"{hosts.second.address}:")
    handed = [past for past in status["handoffs"] if past["cost"].get("transport")]
    assert {past["cost"]["transport"] for past in handed} == {"grpc"}  # they share no memory
    assert len(handed) >= 8
    drafting = next(one["load"]["drafting"] for one in status["workers"] if "drafting" in one["load"])
    assert int(drafting["drafts"]) > 0


@pytest.mark.timeout(300)
def test_a_host_that_dies_is_answered_for(hosts: Hosts, reference: str) -> None:
    """All processes of the second host are killed while it answers: the answer goes on, and is whole."""
    prompt = prompts()[-1][:500]
    expected = answer(reference, prompt, LONG)[0]
    assert len(expected) == LONG
    got: list[int] = []
    with hosts.network.inside():
        for tokens in stream(hosts.url, prompt, LONG):
            if len(got) < LONG / 10 <= len(got) + len(tokens):
                hosts.second.kill()
            got += tokens
    assert got == expected
    assert hosts.ask(prompts()[0])[0]
    eventually(lambda: "second       this node is dead" in hosts.output.read_text(), 40, "Ray notices")


@pytest.mark.timeout(200)
def test_ctrl_c_leaves_nothing_behind(hosts: Hosts) -> None:
    look = "import psutil; print([p.info['cmdline'] for p in psutil.process_iter(['cmdline'])])"
    assert "baton prefill-0" in hosts.first.run([str(PYTHON), "-c", look], 20).stdout
    (command,) = psutil.Process(hosts.up.pid).children()  # of what entered the host's namespaces
    command.send_signal(signal.SIGINT)
    assert hosts.up.wait(CALL_S) == 0, hosts.output.read_text()
    assert "nothing is left" in hosts.output.read_text()
    left = hosts.first.run([str(PYTHON), "-c", look], 20).stdout
    assert "baton" not in left.replace(str(ROOT), "")
    assert hosts.first.process.poll() is None  # Ray itself is not its own
