"""The product's placement policy against others, on a simulated fleet (bench/placing_sim.py).

    python -m bench placing [--pairs 8 32] [--requests 6000] [--runs 3]

Two kinds of load: prompts that have nothing in common, where knowledge of caches must do no harm, and chats.
Each policy gets the same requests, with as many seeds as there are runs; figures are medians.
"""

from __future__ import annotations

import argparse

from baton.services.config import PolicySettings
from bench.placing_sim import Fleet, Shape
from harness.stats import medians, percentile, save

QUEUE = {"queued_prompt_tokens": 1.0, "staging_room": 1.0, "running_requests": 1.0, "free_blocks": 1.0}
# Name -> scorers (None: the default ones), and whether the scheduler hears of caches.
ARMS: dict[str, tuple[dict[str, float] | None, bool]] = {
    "random": ({}, False),
    "queue": (QUEUE, False),  # the shortest queue of prompt tokens
    "without_events": (None, False),
    "default": (None, True),
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--requests", type=int, default=6_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--weights", type=float, nargs="+", default=[], help="of prefill_work, as more arms")
    options = parser.parse_args(arguments)
    arms = dict(ARMS)
    for weight in options.weights:
        scorers = {**PolicySettings().scorers, "prefill_work": weight}
        arms[f"prefill_work={weight:g}"] = scorers, True
    results: dict[str, dict[str, dict[str, float]]] = {}
    for pairs in options.pairs:
        for kind, chats, load in (("independent", False, 0.7), ("chats", True, 1.5)):
            shape = Shape(pairs, 4_096, load, options.requests, chats)
            found = results[f"{kind}, {pairs}P{pairs}D"] = {}
            print(f"{kind}, {pairs}P{pairs}D, prefill load without caches {load:g}")
            for name, (scorers, events) in arms.items():
                policy = PolicySettings() if scorers is None else PolicySettings(scorers=scorers)
                runs = [one(shape, policy, seed, events=events) for seed in range(options.runs)]
                found[name] = medians(runs)
                print(f"  {name:<20}", ", ".join(f"{key} {value:g}" for key, value in found[name].items()))
    save("placing", {"requests": options.requests, "runs": options.runs, "loads": results})


def one(shape: Shape, policy: PolicySettings, seed: int, *, events: bool) -> dict[str, float]:
    """Run one fleet; return its figures."""
    fleet = Fleet(shape, policy, seed, events=events)
    fleet.run()
    times = [1_000 * one for one in fleet.first_token_s[len(fleet.first_token_s) // 5 :]]  # caches are warm
    return {
        "ttft_p50_ms": round(percentile(times, 0.5), 1),
        "ttft_p99_ms": round(percentile(times, 0.99), 1),
        "computed_share": round(fleet.computed / fleet.prompts, 3),
    }
