"""Compare Baton's 1P1D with vLLM's: NixlConnector and vllm-router, with as many engines on the same cores.

vLLM's deployment follows its recipe. NIXL's progress thread spins on a core in each of its engines, so each
deployment runs only during its turn. With that thread off (vLLM has no setting for it) the prefill server's
worker hung and every request timed out. A turn sends long prompts one after another, then short streams while
long prompts arrive. CPU time is that of all processes.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from bench.options import options
from bench.served import MODEL_NAME, engine_settings
from bench.traffic import Mix, run, stream
from harness.deployment import deployment, status_of, stock_vllm
from harness.scrape import samples
from harness.stats import median, medians, percentile, save
from harness.support import ROOT, family, free_port, running

RESULT = "peers"
PINS = Path(__file__).with_name("peers.txt")
INSTALL_S = 1800.0
ROUTER_S = 60.0
LONG = 900  # tokens

Figures = dict[str, float]


@dataclass(frozen=True)
class Arm:
    """A running deployment: its address and its top-level processes."""

    url: str
    pids: tuple[int, ...]
    decode: str = ""  # the address of vLLM's decode server

    def check(self) -> None:
        """Raise RuntimeError if a KV transfer failed, or there was none: vLLM silently recomputes prompts."""
        if not self.decode:
            return
        counts = {sample.name: sample.value for sample in samples(self.decode) if "nixl" in sample.name}
        if not counts.get("vllm:nixl_bytes_transferred_sum") or counts.get(
            "vllm:nixl_num_failed_transfers_total"
        ):
            raise RuntimeError(f"vLLM's decode server did not get its KV by NIXL: {counts}")

    def cpu_s(self) -> float:
        found = {process.pid: process for pid in self.pids for process in family(pid)}
        return sum(sum(process.cpu_times()[:2]) for process in found.values())


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        rounds=(3, "turns of each deployment"),
        seconds=(30.0, "of the mixed load, each time"),
        prompts=(10, "long prompts one at a time, each time"),
        arm=([str], "all by default", ARMS),
    )
    mix = Mix(seconds=given.seconds)
    names = given.arm or list(ARMS)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(given.rounds):
        for name in names:
            try:
                found = turn(ARMS[name], given.prompts, mix, number)
            except (TimeoutError, RuntimeError, aiohttp.ClientError) as error:
                print(f"{name:>28} did not come through: {str(error) or 'no answer in time'}", flush=True)
                continue
            runs[name].append(found)
            print(f"{name:>28}", {key: round(value, 1) for key, value in found.items()}, flush=True)
    middle = {name: medians(results) for name, results in runs.items() if results}
    result = {"load": asdict(mix), "prompts": given.prompts, "turns": given.rounds}
    save(RESULT, result | {"median": middle, "runs": runs})


def turn(arm: Callable[[Path], AbstractContextManager[Arm]], prompts: int, mix: Mix, number: int) -> Figures:
    """Start a deployment, measure it once and end it. Raises RuntimeError if an answer is wrong."""
    with tempfile.TemporaryDirectory() as folder, arm(Path(folder)) as one:
        asyncio.run(run(Mix(seconds=8), one.url, MODEL_NAME, seed=0))  # compiles, connects, allocates
        found = asyncio.run(alone(one, prompts, number)) | asyncio.run(loaded(one, mix, number + 1))
        one.check()
    return found


async def alone(one: Arm, count: int, seed: int) -> dict[str, float]:
    """Send long prompts one at a time, then stay idle for as long. Return times and CPU use."""
    draw = random.Random(seed)
    before, answers = one.cpu_s(), []
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        for _ in range(count):
            prompt = [draw.randrange(100, 4000) for _ in range(LONG)]
            answers.append(await stream(http, one.url, MODEL_NAME, prompt, 8))
    took, after = loop.time() - began, one.cpu_s()
    await asyncio.sleep(took)
    totals = [1e3 * (answer.arrivals[-1] - answer.asked) for answer in answers]
    return {
        "alone_ttft_p50_ms": 1e3 * median([answer.ttft for answer in answers]),
        "alone_second_p50_ms": 1e3 * median([answer.gaps[0] for answer in answers]),
        "alone_total_p50_ms": median(totals),
        "alone_total_p95_ms": percentile(totals, 0.95),
        "alone_cpu_s": (after - before) / count,
        "idle_cores": (one.cpu_s() - after) / took,
    }


async def loaded(one: Arm, mix: Mix, seed: int) -> dict[str, float]:
    """Run the mix. Return the clients' figures and the CPU time per token."""
    before = one.cpu_s()
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await run(mix, one.url, MODEL_NAME, seed)
    tokens = found["tokens_per_s"] * (loop.time() - began)
    return found | {"cpu_ms_a_token": 1e3 * (one.cpu_s() - before) / tokens}


@contextmanager
def baton(folder: Path) -> Iterator[Arm]:
    with deployment(folder, cold=True, engine=engine_settings()) as one:
        one.up(1, 1)
        yield Arm(one.url, tuple(process.popen.pid for process in one.processes.values()))


@contextmanager
def vllm(folder: Path) -> Iterator[Arm]:
    """Serve with two vLLM engines, one per core, behind vllm-router."""
    engine = engine_settings() | {"tool_call_parser": "hermes"}
    with ExitStack() as stack:
        servers = {}
        for core, role in enumerate(("kv_producer", "kv_consumer")):
            transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
            servers[role] = stack.enter_context(
                stock_vllm(
                    folder / role,
                    {
                        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                        "UCX_TLS": "tcp,sysv,posix,cma,self",
                        "UCX_NET_DEVICES": "lo",
                        "UCX_RCACHE_MAX_UNRELEASED": "1024",
                        "VLLM_HOST_IP": "127.0.0.1",
                        "VLLM_CPU_OMP_THREADS_BIND": f"{core}",
                    },
                    cold=True,
                    flags=("--kv-transfer-config", json.dumps(transfer)),
                    **engine,
                )
            )
        (first, producer), (second, consumer) = servers["kv_producer"], servers["kv_consumer"]
        disaggregated = ("--vllm-pd-disaggregation", "--kv-connector", "nixl")
        line = (*disaggregated, "--prefill", first, "--decode", second)
        url, process = stack.enter_context(vllm_router(folder, *line))
        yield Arm(url, (process.pid, producer.popen.pid, consumer.popen.pid), second)


def _installed() -> Path:
    """Return a folder with vllm-router's command, installing PINS on first use and after a change."""
    folder = ROOT / ".venv-peers"
    mark = folder / "pins.txt"  # written last
    if not mark.exists() or mark.read_bytes() != PINS.read_bytes():
        print(f"installing bench/{PINS.name} into {folder.name} (some minutes)", flush=True)
        venv = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
        pip += ["--disable-pip-version-check", "install", "-qq", "--no-deps", "-r", str(PINS)]
        for command in (venv, pip):
            subprocess.run(command, check=True, timeout=INSTALL_S)
        shutil.copyfile(PINS, mark)
    return folder / "bin"


@contextmanager
def vllm_router(folder: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run vllm-router with these flags and its log in `folder`. Yield its URL and process."""
    port = free_port()
    line = [str(_installed() / "vllm-router"), *flags, "--host", "127.0.0.1", "--port", str(port)]
    line += ["--prometheus-port", str(free_port())]
    url = f"http://127.0.0.1:{port}"
    health = f"{url}/health"
    with running(line, lambda: status_of(health) == 200, ROUTER_S, folder / "router.log") as process:
        yield url, process


ARMS: dict[str, Callable[[Path], AbstractContextManager[Arm]]] = {"Baton": baton, "vLLM with NIXL": vllm}
