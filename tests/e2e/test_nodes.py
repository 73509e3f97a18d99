"""Prefill with tensor, decode with data and expert parallelism, each over two hosts, with mutual TLS.

Each process is started by hand, as on machines of one's own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from baton.security.authority import Authority
from harness import gangs, zygote
from harness.architectures.experts import deepseek_v3
from harness.architectures.language import prompt
from harness.deployment import MODEL_NAME, START_S
from harness.greedy import GREEDY, token_ids
from harness.netns import Host, Network, why_not
from harness.support import BATON, CALL_S, END_S, PATIENCE, ROOT, eventually
from harness.zygote import Forked

WRITTEN, LONG = 24, 400
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
    def url(self) -> str:
        return f"http://{self.hosts[0].address}:8000"

    def start(self, name: str, host: int, *command: str, **more: Any) -> Forked:
        line = [*command, "--config", str(self.folder / "baton.yaml")]
        arguments: dict[str, Any] = {"pid": self.hosts[host].pid, "arguments": line} | more
        process = zygote.shared().start(name, "harness.wired:run_inside", self.folder, **arguments)
        self.processes[name] = process
        return process

    def start_gang(self, gang: str, command: tuple[str, ...]) -> None:
        for rank in (0, 1):
            own = ("--gang", gang, "--gang-rank", str(rank), "--worker-id", f"{gang}.r{rank}")
            forks_ranks = "--tensor-parallel-size" in command
            self.start(f"{gang}.r{rank}", rank, *command, *own, "--cpu", str(rank), forks_ranks=forks_ranks)

    def status(self) -> dict[str, Any]:
        command = [str(BATON), "status", "--json", "--config", str(self.folder / "baton.yaml")]
        done = self.hosts[0].run(command, CALL_S, cwd=ROOT)
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return found

    def wait_ready(self, *names: str) -> None:
        def look() -> bool:
            for name in names:
                assert self.processes[name].poll() is None, self.processes[name].text[-3000:]
            workers = self.status().get("workers", [])
            ready = {one["identity"]["worker_id"] for one in workers if one["state"] == "WORKER_STATE_READY"}
            return set(names) <= ready

        eventually(look, START_S, f"{names} are ready; logs in {self.folder}", every_s=0.5)

    def dies_with(self, gang: str, rank: int) -> None:
        """Kill a member. The other must be gone within a second."""
        members = [self.processes[f"{gang}.r{number}"] for number in (0, 1)]
        members[rank].kill()
        began = time.monotonic()
        eventually(lambda: all(one.poll() is not None for one in members), CALL_S, "both have ended", 0.01)
        assert time.monotonic() - began < 1.0 * PATIENCE


@contextmanager
def spread(folder: Path, model: Path) -> Iterator[Spread]:
    with Network(folder / "hosts") as network:
        hosts = [network.host(name, shm_mib=512) for name in ("first", "second")]
        one = Spread(folder, network, hosts)
        Authority.create(folder / "ca")
        engine = {"model": str(model), "served_model_name": MODEL_NAME, "dtype": "float32", "nodes": 2}
        config = {
            "engine": engine | {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_gib": 0.25},
            "scheduler": {"address": f"{hosts[0].address}:7400"},
            "worker": {"listen": "0.0.0.0:0"},
            "handoff": {"staging_mib": 64},
            "security": {"tls": True, "ca": str(folder / "ca"), "plain_ranks": True},
        }
        (folder / "baton.yaml").write_text(yaml.safe_dump(config))
        try:
            one.start("scheduler", 0, "scheduler")
            one.start("router", 0, "router", "--host", hosts[0].address, "--port", "8000")
            one.start_gang("decode-0", DECODE)
            one.start_gang("prefill-0", PREFILL)
            one.wait_ready("prefill-0.r0", "decode-0.r0", "decode-0.r1")
            yield one
        finally:
            zygote.end_all(list(one.processes.values()), END_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes") / "model"
    deepseek_v3(folder)
    return folder


def test_they_answer_like_one_engine_and_streams_survive_their_ends(model: Path, tmp_path: Path) -> None:
    prompts = [prompt(number) for number in range(4)]
    with gangs.Gang(gangs.Options(model, size=1)) as plain:
        for number, tokens in enumerate(prompts):
            plain.add(0, str(number), tokens, WRITTEN if number else LONG)
        expected = plain.answers([str(number) for number in range(4)])
    with ExitStack() as stack:
        one = stack.enter_context(spread(tmp_path, model))
        stack.enter_context(one.network.inside())
        client = stack.enter_context(
            openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", timeout=CALL_S, max_retries=0)
        )

        def check(number: int) -> None:
            asked = {"model": MODEL_NAME, "prompt": prompts[number], "max_tokens": WRITTEN}
            assert token_ids(client.completions.create(**asked, **GREEDY)) == expected[str(number)]

        def stream(number: int, half_way: Callable[[], None]) -> None:
            found: list[int] = []
            asked = {"model": MODEL_NAME, "prompt": prompts[number], "max_tokens": LONG, "stream": True}
            for chunk in client.completions.create(**asked, **GREEDY):
                before = len(found)
                found += token_ids(chunk) if chunk.choices else []
                if before < LONG // 4 <= len(found):
                    half_way()
            assert found == expected[str(number)]

        for number in (1, 2, 3, 1):
            check(number)
        handoffs = one.status()["handoffs"]
        assert any(int(each["cost"].get("handoff_bytes", 0)) for each in handoffs), handoffs
        stream(0, lambda: one.dies_with("prefill-0", 1))
        check(1)
        one.start_gang("prefill-0", PREFILL)
        one.wait_ready("prefill-0.r0")
        stream(0, lambda: one.dies_with("decode-0", 1))
        check(2)
