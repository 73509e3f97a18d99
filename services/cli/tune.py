"""The command `baton tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.services.cli.flags import Of, with_settings
from baton.services.config import Settings
from baton.services.simulate.traces import KINDS

WORKERS = (2, 4_096)
LIMITS = ("max_queued_prompt_tokens", "handoff_min_tokens", "idle_decode_tokens")


@with_settings("scheduler.policy", *(f"scheduler.{name}" for name in LIMITS), of=Of.ONE)
def simulated_splits(
    settings: Settings,
    *,
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help=f"Trace file in Mooncake's format, or a generated kind: {', '.join(KINDS)}."
        ),
    ],
    workers: Annotated[int, typer.Option(help="Number of workers.", min=WORKERS[0], max=WORKERS[1])],
    goal_ttft: Annotated[float, typer.Option(help="Goal for the time to first token, seconds.", min=0)] = 0.5,
    goal_itl: Annotated[
        float, typer.Option(help="Goal for the mean gap between output tokens, seconds.", min=0)
    ] = 0.05,
    profile_file: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            help="JSON file with the workers' speed and size: docs/simulator.md. [default: assumed figures]",
            metavar="FILE",
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests per second of a generated trace.", min=0.001)] = 1.0,
    seconds: Annotated[float, typer.Option(help="Simulated seconds of a generated trace.", min=1)] = 300.0,
    speed: Annotated[
        float, typer.Option(help="Factor by which to speed up the arrivals in a trace file.", min=0.001)
    ] = 1.0,
    most: Annotated[int, typer.Option(help="Requests to take from a trace file; 0: all.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find how many prefill and decode workers serve a trace best.

    Simulates every split of the workers, and as many mixed ones, with the configured policy. Prints the share
    of requests that meet both goals.
    """
    from baton.services.cli.tuning import Load, run_tune
    from baton.services.simulate.figures import Goals

    load = Load(trace, rate=rate, seconds=seconds, speed=speed, most=most, seed=seed)
    run_tune(settings, load, workers, Goals(goal_ttft, goal_itl), profile_file, as_json=json)
