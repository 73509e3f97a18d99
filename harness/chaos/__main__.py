"""`python -m harness.chaos`: break a deployment under load by a seeded plan and check the answers.

    python -m harness.chaos                                  all plans, half an hour of faults
    python -m harness.chaos --plan workers-2p2d --seed 7     one plan; --plan may be repeated
    python -m harness.chaos --list                           plans and faults
    python -m harness.chaos report [FILE]                    write the table of docs/reliability.md

The exit status is 1 if a request failed, a token was wrong, a worker was overbooked, or resources were not
freed within two lease times after the load.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from pathlib import Path

import transformers

from harness.chaos import page
from harness.chaos.faults import FAULTS
from harness.chaos.outcome import Outcome
from harness.chaos.placing_judge import Placed
from harness.chaos.plans import ALL, PLANS
from harness.chaos.run import run


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["report"]:
        print(f"wrote {page.write(Path(arguments[1]) if arguments[1:] else page.RESULTS)}")
        return 0
    options = _parser().parse_args(arguments)
    if options.list:
        print(_listed())
        return 0
    names = options.plan or ALL
    # Both signals cancel the plan's task, and so end its processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    transformers.logging.set_verbosity_error()  # it would warn that the prompts' source texts are too long
    folder = Path(options.logs or tempfile.mkdtemp(prefix="baton-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    say(f"{len(names)} plans, seed {options.seed}, logs in {folder}")
    outcomes: list[Outcome | Placed] = []
    for name in names:
        plan = PLANS[name]
        seconds = options.seconds or plan.seconds
        outcomes.append(asyncio.run(run(plan, options.seed, seconds, folder / name, say)))
        print(outcomes[-1], flush=True)
        if options.out:
            page.save(options.out, outcomes)
    good = all(one.good for one in outcomes)
    say(f"{sum(one.good for one in outcomes)} of {len(outcomes)} plans are good")
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plan", action="append", choices=list(PLANS), metavar="NAME", help="default: all")
    parser.add_argument(
        "--seed", type=int, default=1, help="of faults, their timing and questions (default 1)"
    )
    parser.add_argument("--seconds", type=float, help="of faults in each plan; each plan has a default")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--logs", metavar="FOLDER", help="of all processes; a new folder by default")
    parser.add_argument("--list", action="store_true", help="show plans and faults")
    return parser


def _listed() -> str:
    plans = [
        f"  {one.name:16} {one.shape.name}  {one.seconds:4.0f} s  {one.about}\n{'':26}{', '.join(one.faults)}"
        for one in PLANS.values()
    ]
    faults = [f"  {one.name:26} {one.about} At: {', '.join(one.stages)}." for one in FAULTS.values()]
    return "\n".join(["plans:", *plans, "faults:", *faults])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
