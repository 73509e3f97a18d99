"""Load tools that nobody here wrote, against Baton and one stock vLLM server, in turns on the same cores.

`vllm bench serve` (random prompts of 256 tokens, answers of 64) at several concurrencies and with all
requests at once, and closed loops of exactly as many clients as there may be requests on the workers. Baton
is deploy/laptop.yaml, 1P1D on a core each; stock vLLM has the same model and slots, and both cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from baton.services.config import SchedulerSettings
from bench.light import Client
from bench.stats import median, save
from tests.e2e.deployment import MODEL, MODEL_NAME, deployment, stock_vllm
from tests.support import PYTHON, ROOT

PROMPT_TOKENS, ANSWER_TOKENS = 256, 64
REQUESTS = {"1": 16, "8": 64, "32": 160, "128": 384, "256": 512, "inf": 1000}  # by concurrency
LIMIT_S = 900.0  # of one run of a tool
FIGURES = {
    "tokens_per_s": "output_throughput",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_p50_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
}
# The command line's own entry asks for a package named vllm; on a CPU it has another name.
SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="A B pairs")
    parser.add_argument("--concurrency", nargs="*", choices=REQUESTS, default=list(REQUESTS))
    parser.add_argument("--save", default="clients", help="name of the file in bench/results")
    options = parser.parse_args(arguments)
    config = yaml.safe_load((ROOT / "deploy" / "laptop.yaml").read_text())
    engine = config["engine"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        one = stack.enter_context(deployment(Path(folder) / "baton", **config)).up(1, 1)
        same = {key: engine[key] for key in ("max_model_len", "max_num_seqs")}
        stock, _ = stack.enter_context(
            stock_vllm(Path(folder) / "stock", model=str(MODEL), cold=True, **same)
        )
        arms = {"baton": one.url, "stock": stock}
        for url in arms.values():
            serve(url, "8", 32, Path(folder), seed=0)  # the first requests compile and allocate
        runs: dict[str, dict[str, list[dict[str, float]]]] = {
            concurrency: {name: [] for name in arms} for concurrency in options.concurrency
        }
        for number in range(options.rounds):
            for concurrency, by_arm in runs.items():
                for name, url in arms.items():
                    result = serve(url, concurrency, REQUESTS[concurrency], Path(folder), seed=number + 1)
                    by_arm[name].append(result)
                    print(f"{concurrency:>4} {name:>6}", result, flush=True)
        bound = int(engine["max_num_seqs"] * SchedulerSettings().max_queue_factor)
        loops = {name: asyncio.run(closed(url, bound, 10)) for name, url in arms.items()}
        print(f"{bound} closed loops: {loops}", flush=True)
    middle = {
        concurrency: {name: medians(results) for name, results in by_arm.items()}
        for concurrency, by_arm in runs.items()
    }
    load = {"prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS, "requests": REQUESTS}
    save(options.save, {"load": load, "median": middle, "at_the_bound": loops, "runs": runs})


def serve(url: str, concurrency: str, requests: int, folder: Path, seed: int) -> dict[str, float]:
    """Figures of one run of `vllm bench serve`, and how many requests failed."""
    name = f"{concurrency}.json"
    flags = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": MODEL_NAME,
        "--tokenizer": str(ROOT / "deploy" / "demo-model" / "weights"),
        "--dataset-name": "random",
        "--random-input-len": str(PROMPT_TOKENS),
        "--random-output-len": str(ANSWER_TOKENS),
        "--num-prompts": str(requests),
        "--request-rate": "inf",
        "--seed": str(seed),
        "--result-dir": str(folder),
        "--result-filename": name,
    }
    if concurrency != "inf":
        flags["--max-concurrency"] = concurrency
    words = [word for flag in flags.items() for word in flag]
    # nice: the tool shares the cores with what it measures
    command = ["nice", "-n", "5", str(PYTHON), "-c", SERVE, "--ignore-eos", "--save-result", *words]
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((folder / name).read_text())
    figures = {ours: round(found[theirs], 2) for ours, theirs in FIGURES.items()}
    return {"failed": requests - found["completed"], **figures}


async def closed(url: str, clients: int, each: int) -> dict[str, int]:
    """Statuses of clients that send their next request right after the last byte."""
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


def medians(results: list[dict[str, float]]) -> dict[str, float]:
    """Key by key; of what failed, the sum."""
    middle = {key: round(median([one[key] for one in results]), 2) for key in results[0]}
    return {**middle, "failed": sum(one["failed"] for one in results)}
