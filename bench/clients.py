"""Run other projects' load tools against Baton and one stock vLLM server, alternating on the same cores.

`vllm bench serve`, guidellm and lm-eval run from their command lines, as their users run them
(bench/tools.py). Then closed loops run exactly as many clients as the workers admit requests. Baton is
deploy/laptop.yaml, 1P1D with one core each; stock vLLM has the same model and slots, and both cores.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from baton.services.config import EngineSettings, SchedulerSettings
from bench.light import Client
from bench.options import options
from bench.tools import TOOLS, Figures, installed
from harness.deployment import MODEL, MODEL_NAME, deployment, stock_vllm
from harness.stats import median, save
from harness.support import ROOT

Rows = dict[str, dict[str, list[Figures]]]  # row of a tool's table: arm: rounds


def main(arguments: list[str]) -> None:
    serve = TOOLS["serve"]
    given = options(
        __doc__,
        arguments,
        rounds=(2, "A B pairs"),
        tools=(list(TOOLS), None, TOOLS),
        concurrency=(list(serve.loads), "of serve", serve.loads),
        save=("clients", "name of the file in bench/results"),
    )
    loads = {name: TOOLS[name].loads for name in given.tools}
    if "serve" in loads:
        loads["serve"] = given.concurrency
    config = yaml.safe_load((ROOT / "deploy" / "laptop.yaml").read_text())
    engine = EngineSettings(**config["engine"])  # the defaults of what is not configured
    runs: dict[str, Rows] = {name: defaultdict(lambda: {"baton": [], "stock": []}) for name in loads}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for command in filter(None, (TOOLS[name].installs for name in loads)):
            installed(command)  # while the cores are free
        same: dict[str, Any] = {"max_model_len": engine.max_model_len, "max_num_seqs": engine.max_num_seqs}
        config["engine"] |= same  # the harness has other defaults
        one = stack.enter_context(deployment(Path(folder) / "baton", **config)).up(1, 1)
        stock, _ = stack.enter_context(
            stock_vllm(Path(folder) / "stock", model=str(MODEL), cold=True, **same)
        )
        arms = {"baton": one.url, "stock": stock}
        for url in arms.values():
            serve.run(url, "8", Path(folder), 0)  # the first requests compile and allocate
        for number in range(given.rounds):
            for name, load in ((name, load) for name, some in loads.items() for load in some):
                for arm, url in arms.items():
                    for row, figures in TOOLS[name].run(url, load, Path(folder), number + 1).items():
                        runs[name][row][arm].append(figures)
                        print(f"{name} {row:>4} {arm:>6}", figures, flush=True)
        bound = int(engine.max_num_seqs * SchedulerSettings().max_queue_factor)
        loops = {name: asyncio.run(closed(url, bound, 10)) for name, url in arms.items()}
        print(f"{bound} closed loops: {loops}", flush=True)
    tools = {
        name: {
            "median": {
                row: {arm: medians(results) for arm, results in by_arm.items()}
                for row, by_arm in rows.items()
            },
        }
        for name, rows in runs.items()
    }
    save(given.save, {"tools": tools, "at_the_bound": loops, "runs": runs})


async def closed(url: str, clients: int, each: int) -> dict[str, int]:
    """Count the statuses that closed-loop clients get, `each` requests per client."""
    client = Client(int(url.rpartition(":")[2]))
    statuses: Counter[str] = Counter()

    async def loop(number: int) -> None:
        prompt = [300 + number] * 16
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True}
        for _ in range(each):
            statuses[str((await client.post("/v1/completions", body)).status)] += 1

    try:
        await asyncio.gather(*(loop(number) for number in range(clients)))
    finally:
        await client.close()
    return dict(statuses)


def medians(results: list[Figures]) -> Figures:
    """Return each key's median, unrounded if it never changed, and the sum of `failed`."""
    middle = {key: _middle([one[key] for one in results]) for key in results[0]}
    return {**middle, "failed": sum(one["failed"] for one in results)}


def _middle(values: list[float]) -> float:
    return values[0] if len(set(values)) == 1 else round(median(values), 2)
