"""Autoscaling on Ray: real workers of the demo model that come and go with the load, and nodes with them.

Ray's fake multi-node provider adds nodes and takes them away (harness/ray_autoscaler.py); the head has room
for two workers. Each worker is held to a share of a core once it serves, as if it had a machine of its own.
The load doubles, halves, and changes from long prompts to long answers; each arm gets the same requests:

    on      the scheduler chooses the numbers
    1P2D    fixed numbers, and the scheduler's advice: its predictions are compared with what came. By default
            all splits of as many workers as `on` had on the mean
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from baton.protos import scheduler_pb2 as pb
from baton.ray import deploy
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.services.ray.deployment import Deployment
from baton.services.roles import name_of
from bench.traffic import Answer, stream
from harness import shares
from harness.deployment import MODEL, MODEL_NAME
from harness.ray_autoscaler import ENVIRONMENT, ray_autoscaler
from harness.shares import Shares
from harness.stats import median, save
from harness.support import free_port

SHARE = 0.25  # of a core, for each worker
GOALS = {"ttft_ms": 2_000.0, "itl_ms": 70.0}
MOST = {"prefill": 2, "decode": 3}
HEAD = 2  # workers for which the head has room
LOOK_S = 0.5
VOCABULARY = (100, 4_000)
REQUEST_S = 120.0  # after which one has failed
FIXED = re.compile(r"(\d)P(\d)D")
METRIC = re.compile(r"^baton_scheduler_autoscale_(\w+?)(?:_total)?\{(?:what|order)=\"(\w+)\"\} (\S+)$", re.M)


@dataclass(frozen=True)
class Phase:
    """Some time of a load. Lengths are means; each request's are within a half of them."""

    name: str
    seconds: float
    per_s: float  # requests, at random
    prompt: int  # tokens
    answer: int


PHASES = [
    Phase("as usual", 25, 2.5, 256, 64),
    Phase("twice as much", 40, 5.0, 256, 64),
    Phase("half of it", 30, 1.25, 256, 64),
    Phase("long prompts", 40, 1.6, 660, 16),
    Phase("long answers", 35, 2.9, 64, 160),
]


@dataclass
class Request:
    """One request, and what came of it."""

    at: float  # s
    phase: str
    prompt: int
    tokens: int
    answer: Answer | None = None
    failure: str = ""

    @property
    def first_token(self) -> bool:
        return self.answer is not None and 1e3 * self.answer.ttft <= GOALS["ttft_ms"]

    @property
    def gap(self) -> bool:
        if self.answer is None:
            return False
        took = self.answer.arrivals[-1] - self.answer.arrivals[0]
        return 1e3 * took / max(1, self.answer.tokens - 1) <= GOALS["itl_ms"]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench ray-autoscale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--arm", action="append", help="on, or fixed numbers as 1P2D; on and two of the same cost"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the length of each phase")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals and lengths")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    options = parser.parse_args(arguments)
    if why := shares.why_not():
        raise SystemExit(f"no shares of cores: {why}")
    os.environ |= ENVIRONMENT
    phases = [replace(one, seconds=options.scale * one.seconds) for one in PHASES]
    arms = {}
    with tempfile.TemporaryDirectory() as folder:  # of one CA: this process is one operator
        todo = options.arm or ["on"]
        for arm in todo:
            arms[arm] = run(arm, phases, options.seed, Path(folder))
            if not options.arm and arm == "on":
                todo += same_cost(arms[arm]["mean_workers"])
            print(arm, {key: value for key, value in arms[arm].items() if key != "counts"}, flush=True)
    result = {
        "share": SHARE,
        "goals": GOALS,
        "most": MOST,
        "seed": options.seed,
        "phases": [asdict(one) for one in phases],
        "arms": arms,
    }
    if not options.dry:
        save("ray-autoscale", result)
    if bad := [arm for arm, figures in arms.items() if figures["failed"]]:
        raise SystemExit(f"requests failed: {bad}")


def same_cost(workers: float) -> list[str]:
    """Return the ways to split so many workers, within the bounds."""
    total = round(workers)
    return [
        f"{prefill}P{total - prefill}D"
        for prefill in range(1, MOST["prefill"] + 1)
        if 1 <= total - prefill <= MOST["decode"]
    ]


def run(arm: str, phases: Sequence[Phase], seed: int, folder: Path) -> dict[str, Any]:
    """Start a cluster and a deployment, and measure one arm."""
    nodes = sum(MOST.values()) - HEAD
    with (
        ray_autoscaler(folder, nodes=nodes, head_cpus=HEAD) as cluster,
        Shares(SHARE) as held,
    ):
        metrics = free_port()
        tree = _tree(arm, folder, metrics)

        def tell(name: str, text: str) -> None:
            print(f"  {arm}: {name:<12} {text}", flush=True)

        with deploy(tree, address=cluster.address, log_dir=f"{folder}/{arm}", tell=tell) as deployment:
            return asyncio.run(_Arm(deployment, held, metrics).measure(requests_of(phases, seed)))


def requests_of(phases: Sequence[Phase], seed: int) -> list[Request]:
    """Return the requests of all phases: Poisson arrivals, lengths within a half of their means."""
    draw = random.Random(seed)
    found, at, ends = [], 0.0, 0.0
    for phase in phases:
        at, ends = ends, ends + phase.seconds
        while (at := at + draw.expovariate(phase.per_s)) < ends:
            prompt, answer = (round(mean * draw.uniform(0.5, 1.5)) for mean in (phase.prompt, phase.answer))
            found.append(Request(at, phase.name, prompt, max(2, answer)))
    return found


def _tree(arm: str, folder: Path, metrics: int) -> dict[str, Any]:
    """Return cluster.yaml of an arm."""
    fixed = FIXED.fullmatch(arm)
    numbers = dict(zip(MOST, map(int, fixed.groups()), strict=True)) if fixed else {}
    sides = {
        f"{role}_config": {
            "placement_group_config": {"bundles": [{"CPU": 1}]},
            "deployment_config": {"num_replicas": numbers[role]}
            if numbers
            else {"autoscaling_config": {"min_replicas": 1, "max_replicas": most}},
        }
        for role, most in MOST.items()
    }
    own: dict[str, Any] = {
        "engine": {
            "model": str(MODEL),
            "served_model_name": MODEL_NAME,
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "kv_cache_gib": 0.25,
        },
        "scheduler": {"metrics_port": metrics},
        "router": {"port": free_port()},
        "handoff": {"staging_mib": 64},
        "security": {"ca": str(folder / "ca")},
        "slo": GOALS,
        "autoscale": {"mode": "advise" if numbers else "on", "down_after_s": 15.0},
    }
    if numbers:
        own["autoscale"] |= {f"max_{role}": most for role, most in MOST.items()}
    return {**own, **sides}


class _Arm:
    def __init__(self, deployment: Deployment, held: Shares, metrics: int) -> None:
        self._deployment = deployment
        self._held = held
        host = deployment.scheduler_address.rpartition(":")[0]
        self._metrics = f"http://{host}:{metrics}/metrics"
        self._counts: list[list[float]] = []  # s, prefill and decode workers that serve, workers with room
        self._settled: list[dict[str, float]] = []  # errors of predictions, per cent
        self._came: dict[str, float] = {}
        self._orders: dict[str, int] = {}

    async def measure(self, requests: list[Request]) -> dict[str, Any]:
        (url, *_) = self._deployment.urls
        draw = random.Random(0)
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http,
            SchedulerClient(self._deployment.scheduler_address) as client,
        ):
            await self._look(client, 0.0)
            for _ in range(4):  # the first ones compile and allocate
                await stream(http, url, MODEL_NAME, _prompt(draw, 300), 16)
            began = time.perf_counter()
            self._counts.clear()
            looking = asyncio.create_task(self._keep_looking(client, began))

            async def send(one: Request) -> None:
                await asyncio.sleep(max(0.0, began + one.at - time.perf_counter()))
                try:
                    one.answer = await stream(http, url, MODEL_NAME, _prompt(draw, one.prompt), one.tokens)
                except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
                    one.failure = f"{one.at:.1f} s, {one.phase}: {type(error).__name__} {error}"
                    print(one.failure, flush=True)

            await asyncio.gather(*map(send, requests))
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
        return self._figures(requests)

    async def _keep_looking(self, client: SchedulerClient, began: float) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look(client, time.perf_counter() - began)

    async def _look(self, client: SchedulerClient, at: float) -> None:
        """Note the numbers, hold new workers to their share, and read predictions that are over."""
        try:
            workers = (await client.describe()).workers
        except SchedulerError:
            return
        serving = [one.identity for one in workers if one.state == pb.WORKER_STATE_READY]
        for one in serving:
            self._held.hold(int(one.worker_id.rpartition(".")[2]))
        roles = [name_of(one.role) for one in serving]
        parts = (await asyncio.to_thread(self._deployment.status))["parts"]
        room = sum(bool(part["node"]) for part in parts if part["role"] in MOST)
        self._counts.append([round(at, 1), roles.count("prefill"), roles.count("decode"), room])
        figures = await asyncio.to_thread(self._scrape)
        self._orders = {key: int(value) for key, value in figures.get("orders", {}).items()}
        if (came := figures.get("came", {})) and came != self._came:
            self._came = came
            self._settled.append(dict(figures.get("error_percent", {})))

    def _scrape(self) -> Mapping[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        with urllib.request.urlopen(self._metrics, timeout=5) as reply:  # noqa: S310 (our own http URL)
            for name, label, value in METRIC.findall(reply.read().decode()):
                found.setdefault(name, {})[label] = float(value)
        return found

    def _figures(self, requests: list[Request]) -> dict[str, Any]:
        phases = {one.phase: [other for other in requests if other.phase == one.phase] for one in requests}
        errors = {what for one in self._settled for what in one}
        return {
            "requests": len(requests),
            "failed": sum(bool(one.failure) for one in requests),
            **_shares(requests),
            "by_phase": {name: _shares(some)["within_percent"] for name, some in phases.items()},
            "mean_workers": round(sum(room for *_, room in self._counts) / len(self._counts), 2),
            "orders": self._orders,
            "prediction_error_percent": {
                what: round(median([one[what] for one in self._settled if what in one]), 1)
                for what in sorted(errors)
            },
            "predictions": len(self._settled),
            "counts": self._counts,
        }


def _prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(*VOCABULARY) for _ in range(length)]


def _shares(requests: Sequence[Request]) -> dict[str, float]:
    def percent(good: int) -> float:
        return round(100 * good / max(1, len(requests)), 1)

    return {
        "within_percent": percent(sum(one.first_token and one.gap for one in requests)),
        "first_token_percent": percent(sum(one.first_token for one in requests)),
        "gap_percent": percent(sum(one.gap for one in requests)),
    }
