"""Stalls of running streams by long prompts: 1P1D against two aggregated engines on the same cores.

Both deployments stay up; the load goes to one at a time, A B A B, so that the machine's moods hit both.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.model import MODEL_NAME, engine_settings
from bench.traffic import Mix, run
from harness.deployment import deployment
from harness.stats import medians, save


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="A B pairs")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load, each time")
    options = parser.parse_args(arguments)
    mix = Mix(seconds=options.seconds)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config: dict[str, Any] = {"engine": engine_settings()}
        # The aggregated engines prefill as vLLM does by default: a whole prompt where a step has room for it.
        stock = {"engine": {**engine_settings(), "max_num_batched_tokens": 2048}}
        stock["engine"]["extra"] = {"long_prefill_token_threshold": 0, "scheduling_policy": "fcfs"}
        arms = {
            "1P1D": stack.enter_context(deployment(Path(folder) / "pd", **config)).up(1, 1),
            "2 aggregated": stack.enter_context(deployment(Path(folder) / "mixed", **stock)).up(
                0, 0, mixed=2
            ),
        }
        for one in arms.values():  # the first requests compile and allocate
            asyncio.run(run(Mix(seconds=8), one.url, MODEL_NAME, seed=0))
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        for number in range(options.rounds):
            for name, one in arms.items():
                result = asyncio.run(run(mix, one.url, MODEL_NAME, seed=number + 1))
                runs[name].append(result)
                print(f"{name:>14}", {key: round(value, 1) for key, value in result.items()}, flush=True)
    middle = {name: medians(results) for name, results in runs.items()}
    ours, theirs = middle["1P1D"], middle["2 aggregated"]
    ratios = {
        "itl_max (goal <= 0.2)": ours["itl_max_ms"] / theirs["itl_max_ms"],
        "ttft_short (goal <= 2)": ours["ttft_short_p50_ms"] / theirs["ttft_short_p50_ms"],
        "tokens_per_s (goal >= 0.9)": ours["tokens_per_s"] / theirs["tokens_per_s"],
    }
    print({key: round(value, 3) for key, value in ratios.items()})
    save("disaggregation", {"load": vars(mix), "median": middle, "ratios": ratios, "runs": runs})
