"""Autoscaling: a simulation of a deployment under changing load, and the cost of a decision.

    python -m bench autoscale [--seed 1] [--start 10 30]

The simulator (bench/autoscale_sim.py) runs the product's controller on queues whose service times are those
that clients measured on real workers (bench/results/clients.json). The load doubles, halves, and changes from
long prompts to long answers; fixed fleets get the same requests. A decision is timed at 1,000 workers and 100
routers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from typing import Any

from baton.autoscale.capacity import Gap
from baton.autoscale.controller import Controller
from baton.autoscale.goals import Bounds, Goals
from baton.autoscale.histogram import SECONDS, TOKENS
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.autoscaler import seen
from baton.scheduler.types import FleetView, Reserved, Told, WorkerRecord
from bench.autoscale_sim import Phase, Run, Service, requests_of, simulate
from harness.stats import RESULTS, save

PROMPT = 256  # tokens of the prompts in clients.json
PLACES = 16
GOALS = Goals("on", 2.0, 0.04, Bounds(1, 12), Bounds(1, 12), 2.0, 120.0, 5.0)
PHASES = [
    Phase("as usual", 300, 10.0, 512, 128),
    Phase("twice as much", 300, 20.0, 512, 128),
    Phase("half of it", 300, 5.0, 512, 128),
    Phase("long prompts", 300, 10.0, 1_000, 32),
    Phase("long answers", 300, 8.0, 128, 400),
]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals and lengths")
    parser.add_argument(
        "--start", type=float, nargs="+", default=[10.0, 30.0], help="seconds until a new worker serves"
    )
    options = parser.parse_args(arguments)
    service = measured()
    print(f"a worker: {service}")
    result = {
        "service": asdict(service),
        "goals": {"first_token_s": GOALS.first_token_s, "gap_s": GOALS.gap_s},
        "seed": options.seed,
        "phases": [asdict(phase) for phase in PHASES],
        **compare(service, options.seed, options.start),
        "decision_ms": {"workers": 1_000, "routers": 100, **decision_ms()},
    }
    print("a decision at 1,000 workers and 100 routers, ms:", result["decision_ms"])
    save("autoscale", result)


def measured() -> Service:
    """Return what a worker does, by what `vllm bench serve` measured through 1P1D of Baton.

    The gap by the number of requests is a line through those at 1, 8 and 32; prompts are prefilled at the
    pace of one alone, with all that its first token takes.
    """
    tool = json.loads((RESULTS / "clients.json").read_text())["tools"]["serve"]["median"]
    points = [(float(number), tool[number]["baton"]["itl_p50_ms"] / 1e3) for number in ("1", "8", "32")]
    line = statistics.linear_regression(*zip(*points, strict=True))
    first_token_s = tool["1"]["baton"]["ttft_p50_ms"] / 1e3
    return Service(round(PROMPT / first_token_s), Gap(round(line.intercept, 5), round(line.slope, 6)), 64)


def compare(service: Service, seed: int, starts: list[float]) -> dict[str, Any]:
    """Run autoscaled deployments, then fixed ones with the same requests, up to what serves as well."""
    requests = requests_of(PHASES, seed)
    print(f"{len(requests)} requests, goals: first token {GOALS.first_token_s} s, gap {GOALS.gap_s} s")
    print("fleet               workers  within both  first token     gap  orders")
    scaled: dict[str, Run] = {}
    for start_s in starts:
        scaled[f"{start_s:g}"] = simulate(
            requests, service, (2, 2), Controller(GOALS), places=PLACES, start_s=start_s
        )
        _show(f"autoscaled, {start_s:g} s", scaled[f"{start_s:g}"])
    fixed: dict[str, Run] = {}
    total = int(min(run.mean_workers for run in scaled.values()))
    goal = max(run.within for run in scaled.values())
    while total <= PLACES:
        tried = {
            f"{total - decode}P{decode}D": simulate(
                requests, service, (total - decode, decode), goals=(GOALS.first_token_s, GOALS.gap_s)
            )
            for decode in range(1, total)
        }
        best = max(tried, key=lambda name: tried[name].within)
        fixed[best] = tried[best]
        _show(f"best of {total}: {best}", tried[best])
        if tried[best].within >= goal:
            break
        total += 1
    first = next(iter(scaled.values()))
    return {
        "autoscaled": {start: run.figures() for start, run in scaled.items()},
        "fixed": {name: run.figures() for name, run in fixed.items()},
        "requests": len(requests),
        "counts": first.counts,
        "prediction_error_percent": {
            what: {"median": round(statistics.median(all_), 1), "mean": round(statistics.fmean(all_), 1)}
            for what, all_ in first.errors.items()
        },
    }


def decision_ms(workers: int = 1_000, routers: int = 100, steps: int = 30) -> dict[str, float]:
    """Return the CPU time of a decision, from the view and messages on, with all workers busy."""
    goals = Goals("on", 1.0, 0.04, Bounds(1, workers), Bounds(1, workers), 2.0, 120.0, 5.0)
    controller = Controller(goals)
    fleets = {f"f{n}": _fleet(range(n * 8, n * 8 + 10)) for n in range(workers // 8)}
    took = []
    for step in range(steps):
        view = FleetView({f"w{n}": _busy_worker(n, step) for n in range(workers)})
        load = _busy_router(step, workers / routers)
        told = Told({f"r{n}": load for n in range(routers)}, fleets, {})
        began = time.thread_time()  # of this thread alone: other work on the machine does not count
        controller.step(seen(view, told, 2.0 * step))
        took.append(1e3 * (time.thread_time() - began))
    return {"p50": round(statistics.median(took), 1), "max": round(max(took), 1)}


def _fleet(numbers: range) -> bytes:
    places = [pb.Place(name=f"w{n}") for n in numbers]
    return pb.OrdersRequest(fleet_id="f", places=places).SerializeToString()


def _busy_worker(number: int, step: int) -> WorkerRecord:
    role = (pb.ROLE_PREFILL, pb.ROLE_DECODE)[number % 2]
    counts = pb.EngineCounts(
        busy_s=1.4 * step,
        computed_tokens=3_000 * step if role == pb.ROLE_PREFILL else 0,
        output_tokens=1_100 * step,
        request_s=22.0 * step,
    )
    load = pb.WorkerLoad(running=16, free_blocks=500, counts=counts)
    capacity = pb.Capacity(compatibility_hash="c", block_size=16, num_blocks=1_000, max_num_seqs=64)
    identity = pb.WorkerIdentity(worker_id=f"w{number}", role=role, capacity=capacity)
    booked = Reserved(prompt_tokens=400, requests=16)
    return WorkerRecord(identity, pb.WORKER_STATE_READY, load, booked, False, 5.0)


def _busy_router(step: int, workers: float) -> bytes:
    count = int(12 * workers) * step
    return pb.RouterLoad(
        prompts=[count // 18] * (len(TOKENS) + 1),
        prompt_tokens=384 * count,
        first_token=[count // 55] * (len(SECONDS) + 1),
        gap=[count // 55] * (len(SECONDS) + 1),
        over=count,
        output_tokens=100 * count,
    ).SerializeToString()


def _show(name: str, run: Run) -> None:
    figures = run.figures()
    print(
        f"{name:<20}{figures['mean_workers']:>7.2f}  {figures['within_percent']:>10.1f}%  "
        f"{figures['first_token_percent']:>10.1f}%  {figures['gap_percent']:>5.1f}%  {run.orders or ''}"
    )
