"""Prefill with tensor, decode with data and expert parallelism, each over two hosts, with mutual TLS."""

import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import psutil
import pytest
import yaml

from baton.security.authority import Authority
from harness import zygote
from harness.architectures.experts import deepseek_v3
from harness.architectures.language import prompt
from harness.deployment import MODEL_NAME, START_S
from harness.gangs import plain_answers
from harness.greedy import GREEDY, token_ids
from harness.netns import Host, Network, why_not
from harness.support import CALL_S, END_S, PATIENCE, eventually
from harness.zygote import Forked

WRITTEN, LONG = 16, 120
PROMPTS = [prompt(number) for number in range(4)]
PREFILL = ("prefill", "--tensor-parallel-size", "2")
DECODE = ("decode", "--data-parallel-size", "2", "--expert-parallel")

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@dataclass
class Spread:
    """A deployment on two hosts."""

    folder: Path
    network: Network
    hosts: list[Host]
    processes: dict[str, Forked] = field(default_factory=dict)

    @property
    def url(self):
        return f"http://{self.hosts[0].address}:8000"

    def start(self, name, host, *command, **more):
        line = [*command, "--config", str(self.folder / "baton.yaml")]
        arguments = {"pid": self.hosts[host].pid, "arguments": line} | more
        process = zygote.shared().start(name, "harness.wired:run_inside", self.folder, **arguments)
        self.processes[name] = process
        return process

    def start_gang(self, gang, command):
        """Start a member on each host, as by hand."""
        for rank in (0, 1):
            own = ("--gang", f"{gang}/{rank}", "--worker-id", f"{gang}.r{rank}")
            forks_ranks = "--tensor-parallel-size" in command
            self.start(f"{gang}.r{rank}", rank, *command, *own, "--cpu", str(rank), forks_ranks=forks_ranks)

    def status(self):
        line = ("status", "--json", "--config", str(self.folder / "baton.yaml"))
        done = zygote.shared().command(*line, host=self.hosts[0].pid)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def wait_ready(self, *names, but=()):
        """Wait for ready workers of these names, other than those with the ids `but`. Return all ids."""

        def look():
            for name, process in self.processes.items():
                assert name not in {*names, "up", "node"} or process.poll() is None, process.text[-3000:]
            started = [self.processes[name] for name in names if name in self.processes]
            if not all("ready on" in process.text for process in started):
                return []  # cheaper than a status
            workers = self.status().get("workers", [])
            ids = [one["identity"]["worker_id"] for one in workers if one["state"] == "WORKER_STATE_READY"]
            ready = [one for one in ids if one not in but]
            return ready if all(any(one.startswith(name) for one in ready) for name in names) else []

        return eventually(look, START_S, f"{names} are ready; logs in {self.folder}", every_s=0.3)

    def dies_with(self, gang, rank):
        """Kill a member. The other must be gone within a second."""
        members = [self.processes[f"{gang}.r{number}"] for number in (0, 1)]
        members[rank].kill()
        began = time.monotonic()
        eventually(lambda: all(one.poll() is not None for one in members), CALL_S, "both have ended", 0.01)
        assert time.monotonic() - began < 3.0 * PATIENCE


@contextmanager
def spread(folder, model):
    """Make the hosts and the configuration."""
    with Network(folder / "hosts") as network:
        hosts = [network.host(name, shm_mib=512) for name in ("first", "second")]
        one = Spread(folder, network, hosts)
        Authority.create(folder / "ca")
        engine = {"model": str(model), "served_model_name": MODEL_NAME, "dtype": "float32", "nodes": 2}
        config = {
            "engine": engine | {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_gib": 0.25},
            "fleet": {
                "engines": {
                    "prefill": {"tensor_parallel_size": 2},
                    "decode": {"data_parallel_size": 2, "expert_parallel": True},
                }
            },
            "scheduler": {"address": f"{hosts[0].address}:7400"},
            "router": {"host": hosts[0].address, "port": 8000},
            "worker": {"listen": "0.0.0.0:0"},
            "handoff": {"staging_mib": 64},
            "ops": {"listen": ""},
            "security": {"tls": True, "ca": str(folder / "ca"), "plain_ranks": True},
        }
        (folder / "baton.yaml").write_text(yaml.safe_dump(config))
        try:
            yield one
        finally:
            zygote.end_all(list(one.processes.values()), END_S)


@dataclass
class Asking:
    """A client of one deployment, and a plain engine's answers."""

    client: openai.OpenAI
    expected: list[list[int]]

    def check(self, number):
        asked = {"model": MODEL_NAME, "prompt": PROMPTS[number], "max_tokens": WRITTEN}
        done = self.client.completions.create(**asked, **GREEDY)
        assert token_ids(done) == self.expected[number][:WRITTEN]

    def stream(self, half_way):
        """Stream the long answer, and do something in the middle of it."""
        found = []
        asked = {"model": MODEL_NAME, "prompt": PROMPTS[0], "max_tokens": LONG, "stream": True}
        for chunk in self.client.completions.create(**asked, **GREEDY):
            before = len(found)
            found += token_ids(chunk) if chunk.choices else []
            if before < LONG // 4 <= len(found):
                half_way()
        assert found == self.expected[0]


@contextmanager
def asking(one, expected):
    with (
        one.network.inside(),
        openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", timeout=CALL_S, max_retries=0) as client,
    ):
        yield Asking(client, expected)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes") / "model"
    deepseek_v3(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model):
    return plain_answers(model, PROMPTS, (LONG, *[WRITTEN] * 3))


def test_streams_survive_the_end_of_a_member(model, expected, tmp_path):
    with spread(tmp_path, model) as one:
        one.start("scheduler", 0, "scheduler")
        one.start("router", 0, "router")
        one.start_gang("decode-0", DECODE)
        one.start_gang("prefill-0", PREFILL)
        one.wait_ready("prefill-0.r0", "decode-0.r0", "decode-0.r1")
        with asking(one, expected) as ask:
            for number in (1, 2, 3):
                ask.check(number)

            def handed_over():
                told = one.status().get("handoffs", [])
                return any(int(each["cost"].get("handoff_bytes", 0)) for each in told)

            eventually(handed_over, CALL_S, "a handoff is reported")
            ask.stream(lambda: one.dies_with("decode-0", 1))
            ask.check(2)
            one.dies_with("prefill-0", 1)


def test_a_limb_that_never_comes(model, tmp_path):
    with spread(tmp_path, model) as one:
        one.start("scheduler", 0, "scheduler")
        wait = {"baton.services.worker.gang:MEET_S": 2.0}
        leader = one.start("leader", 0, *PREFILL, "--gang", "prefill-0", constants=wait)
        assert leader.wait(CALL_S) == 1
        assert "gang prefill-0: rank 1 of 2 did not join within 2 s; see why it did not start" in leader.text


@pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="set WHOLE_TABLE: everything starts twice")
def test_supervisors_restart_both_parts(model, expected, tmp_path):
    """`baton up` runs the first host, `baton node` the second."""
    with spread(tmp_path, model) as one:
        fleet = ("--prefill", "1", "--decode", "1", "--log-dir")
        one.start("up", 0, "up", *fleet, str(tmp_path / "up"))
        node = one.start("node", 1, "node", "--node-rank", "1", *fleet, str(tmp_path / "node"))
        names = "prefill-0.r0", "decode-0.r0", "decode-0.r1"
        ids = one.wait_ready(*names)
        with asking(one, expected) as ask:
            for number in (1, 2, 3):
                ask.check(number)
            parts = psutil.Process(node.pid).children()
            limb = next(part for part in parts if "prefill-0.r1" in " ".join(part.cmdline()))

            ask.stream(limb.kill)
            one.wait_ready("prefill-0.r0", but=tuple(ids))
            for number in (1, 2, 3):
                ask.check(number)
        assert one.processes["up"].poll() is None
