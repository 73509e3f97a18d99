"""`vllm bench serve`: requests all at once, or a fixed number at a time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.tools import TOKENIZER, Figures
from harness.deployment import MODEL_NAME
from harness.support import PYTHON

PROMPT_TOKENS, ANSWER_TOKENS = 256, 64
REQUESTS = {"1": 16, "8": 64, "32": 160, "128": 384, "256": 512, "inf": 1000}  # by concurrency
LIMIT_S = 900.0  # of one run
FIGURES = {
    "tokens_per_s": "output_throughput",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_p50_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
}
# The command line's own entry needs a package named vllm; the CPU's has another name.
SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class Serve:
    about = (
        f"`vllm bench serve`, prompts of {PROMPT_TOKENS} random tokens, answers of {ANSWER_TOKENS}, by "
        f"concurrency; `inf`: "
        f"all {REQUESTS['inf']} requests at once."
    )
    columns: Sequence[str] = ("failed", *FIGURES)
    loads: Sequence[str] = tuple(REQUESTS)

    def prepare(self) -> None:
        """Do nothing: the tool comes with vLLM."""

    def run(self, url: str, load: str, folder: Path, seed: int) -> dict[str, Figures]:
        name, requests = f"{load}.json", REQUESTS[load]
        flags = {
            "--backend": "openai",
            "--base-url": url,
            "--endpoint": "/v1/completions",
            "--model": MODEL_NAME,
            "--tokenizer": str(TOKENIZER),
            "--dataset-name": "random",
            "--random-input-len": str(PROMPT_TOKENS),
            "--random-output-len": str(ANSWER_TOKENS),
            "--num-prompts": str(requests),
            "--request-rate": "inf",
            "--seed": str(seed),
            "--result-dir": str(folder),
            "--result-filename": name,
        }
        if load != "inf":
            flags["--max-concurrency"] = load
        words = [word for flag in flags.items() for word in flag]
        # nice: the tool shares the cores with the servers
        command = ["nice", "-n", "5", str(PYTHON), "-c", SERVE, "--ignore-eos", "--save-result", *words]
        subprocess.run(
            command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        found: dict[str, Any] = json.loads((folder / name).read_text())
        figures = {ours: round(found[theirs], 2) for ours, theirs in FIGURES.items()}
        return {load: {"failed": requests - found["completed"], **figures}}
