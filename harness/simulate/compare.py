"""Compare policies on the same requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from baton.services.config import PolicySettings
from baton.services.simulate.deployment import Setup
from baton.services.simulate.figures import Run
from baton.services.simulate.simulation import Progress, simulate
from baton.services.simulate.traces import KINDS, Conversations, Trace
from harness.simulate.baselines import POLICIES, install
from harness.stats import median

# Requests per second and prefill worker of the assumed profile, by kind: a load that only some policies
# handle.
LOADS = {"chats": 4.0, "shared": 5.0, "agents": 2.0, "documents": 0.8, "prompts": 2.6}
Arms = Mapping[str, tuple[PolicySettings, bool]]
Make = Callable[[int], Trace]  # a trace, by its seed


@dataclass(frozen=True)
class Compared:
    """The runs of an arm, and the medians of their figures."""

    figures: dict[str, float]
    runs: list[Run]


def conversations(kind: str, per_s: float, seconds: float, longest: int) -> Make:
    """Return a function that creates a trace from a seed."""
    return lambda seed: Conversations(KINDS[kind], per_s, seconds, seed=seed, most_tokens=longest - 1)


def compare(setup: Setup, make: Make, arms: Arms, seeds: int) -> dict[str, Compared]:
    """Run each arm on the same traces, one per seed, and print the progress to stderr."""
    install()
    found = {}
    for name, (policy, events) in arms.items():
        runs = []
        for seed in range(seeds):
            scheduler = setup.scheduler.model_copy(update={"policy": policy})
            one = replace(setup, scheduler=scheduler, events=events, seed=seed)
            runs.append(simulate(one, make(seed), _progress(f"{name}, seed {seed}")))
        found[name] = Compared(_medians(runs), runs)
    return found


def named(names: list[str]) -> Arms:
    """Return the arms of these names, or all. Raises SystemExit for an unknown name."""
    if unknown := set(names) - set(POLICIES):
        raise SystemExit(f"there is no policy {min(unknown)!r}; there are: {', '.join(POLICIES)}")
    return {name: POLICIES[name] for name in names or POLICIES}


def _medians(runs: list[Run]) -> dict[str, float]:
    all_figures = [run.figures() for run in runs]
    return {key: round(median([one[key] for one in all_figures]), 4) for key in all_figures[0]}


def _progress(what: str) -> Progress:
    began = time.monotonic()

    def tell(share: float, over: int) -> None:
        took_s = time.monotonic() - began
        print(f"  {what}: {share:.0%}, {over:,} requests, {took_s:.0f} s", file=sys.stderr, flush=True)

    return tell
