"""Measure how long prompts stall running streams: 1P1D against two aggregated engines on the same cores.

Both deployments stay up, and the load alternates between them.
"""

from __future__ import annotations

import asyncio

from bench.options import options
from bench.served import AGGREGATED, MODEL_NAME, engine_settings, in_turns, up
from bench.traffic import Mix, run
from harness.stats import medians, save


def main(arguments: list[str]) -> None:
    given = options(__doc__, arguments, rounds=(3, "A B pairs"), seconds=(30.0, "of load, each time"))
    mix = Mix(seconds=given.seconds)
    with up(1, 1) as one, up(0, 0, 2, engine=engine_settings() | AGGREGATED) as two:
        arms = {"1P1D": one, "2 aggregated": two}
        for each in arms.values():  # the first requests compile and allocate
            asyncio.run(run(Mix(seconds=8), each.url, MODEL_NAME, seed=0))
        runs = in_turns(
            arms, given.rounds, lambda each, number: asyncio.run(run(mix, each.url, MODEL_NAME, number + 1))
        )
    middle = {name: medians(results) for name, results in runs.items()}
    ours, theirs = middle["1P1D"], middle["2 aggregated"]
    ratios = {
        "itl_max (goal <= 0.2)": ours["itl_max_ms"] / theirs["itl_max_ms"],
        "ttft_short (goal <= 2)": ours["ttft_short_p50_ms"] / theirs["ttft_short_p50_ms"],
        "tokens_per_s (goal >= 0.9)": ours["tokens_per_s"] / theirs["tokens_per_s"],
    }
    print({key: round(value, 3) for key, value in ratios.items()})
    save("disaggregation", {"load": vars(mix), "median": middle, "ratios": ratios, "runs": runs})
