"""Measure what it costs to be watched: tokens/s and time to first token, with everything on and off.

Two 1P1D deployments of the same kind take turns. On: Prometheus scrapes each process every five seconds, with
all rules; requests are traced to a collector, one in a hundred and all slow ones; the live page has a reader.
Off: none of it. Prometheus, collector and reader share the machine's cores with the workers, as they do on a
laptop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench.live_page import readers
from bench.model import MODEL_NAME, engine_settings
from bench.traffic import Mix, run
from harness.collector import collecting
from harness.deployment import Deployment, deployment
from harness.prometheus import prometheus, why_not
from harness.stats import median, save
from harness.support import free_port

FIGURES = ("tokens_per_s", "ttft_short_p50_ms", "ttft_long_p50_ms", "itl_p50_ms", "itl_p99_ms")
GOAL = 0.02
SLOW_MS = 2_000.0


def main(arguments: list[str]) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench watched",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7, help="off, on, off, on")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each")
    options = parser.parse_args(arguments)
    if why := why_not():
        raise SystemExit(f"{why}: run deploy/setup/venv as root")
    page, metrics = free_port(), free_port()
    runs: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spans = stack.enter_context(collecting())
        seen = {"endpoint": f"http://127.0.0.1:{spans.port}", "sample_ratio": 0.01, "slow_ms": SLOW_MS}
        on = {
            "tracing": seen,
            "ops": {"listen": f"127.0.0.1:{page}"},
            "scheduler": {"metrics_port": metrics},
        }
        arms = {
            "off": (stack.enter_context(up(folder / "off")), nullcontext()),
            "on": (stack.enter_context(up(folder / "on", **on)), None),
        }
        for one, _ in arms.values():
            asyncio.run(run(Mix(seconds=5), one.url, MODEL_NAME, seed=0))
        for number in range(options.rounds):
            for name, (one, quiet) in arms.items():
                watching = quiet or watched(folder / f"watch-{number}", metrics, page)
                with watching:
                    mix = Mix(seconds=options.seconds)
                    runs[name].append(asyncio.run(run(mix, one.url, MODEL_NAME, seed=number)))
                print(f"{name:>3}", {key: round(runs[name][-1][key], 1) for key in FIGURES}, flush=True)
        traced = len({span.trace_id for span in spans.spans})
    medians = {
        name: {key: round(median([value[key] for value in values]), 2) for key in FIGURES}
        for name, values in runs.items()
    }
    change = {key: round(medians["on"][key] / medians["off"][key] - 1, 4) for key in FIGURES}
    print("change", change, f"{traced} traces", flush=True)
    save("watched", {"goal": GOAL, "medians": medians, "change": change, "traces": traced, "runs": runs})


@contextmanager
def up(folder: Path, **sections: Any) -> Iterator[Deployment]:
    """Start 1P1D."""
    with deployment(folder, engine=engine_settings(), **sections) as one:
        yield one.up(1, 1)


@contextlib.contextmanager
def watched(folder: Path, metrics: int, page: int) -> Iterator[None]:
    """Scrape all processes, and read the page."""
    reading: AbstractContextManager[None] = readers(page, 1)
    with prometheus(folder, [f"http://127.0.0.1:{metrics}/targets"]), reading:
        yield
