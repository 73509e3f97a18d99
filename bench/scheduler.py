"""The cost of a placement: place, report the prefill, report the end, over real gRPC.

    python -m bench scheduler [--stores memory redis] [--workers 8]
    python -m bench scheduler --rates 100 500 1000 [--hold 300] [--against FOLDER]
    python -m bench scheduler --rates 500 1000 --schedulers 1 2 [--hold 30]

Scheduler and routers share one process and its core here, so the figures are a lower bound. The run fails,
and reports nothing, when a placement was refused or a reservation is left over. With `--rates` it measures
what share of a core the scheduler's own process takes over Redis (bench/scheduler_cpu.py), and nothing else;
`--against` another checkout in turns, `--schedulers` so many that share the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import uuid
from pathlib import Path

import uvloop

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.services.config import SchedulerSettings
from baton.services.imports import collect_seldom
from bench import scheduler_cpu
from harness.scheduling import place
from harness.stats import save
from harness.support import ROOT, free_port, redis_server

FEW = 8  # workers, of the figures on the page


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stores", nargs="+", default=["memory", "redis"], help="redis starts a server")
    parser.add_argument("--workers", type=int, default=FEW, help="half of them prefill, half decode")
    parser.add_argument("--requests", type=int, default=3_000, help="in all, at each concurrency")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument(
        "--rates", type=int, nargs="+", help="placements a second: the scheduler's share of a core"
    )
    parser.add_argument("--hold", type=float, default=300.0, help="seconds that each rate is held")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    parser.add_argument(
        "--schedulers", type=int, nargs="+", help="with --rates: so many share the requests, in turns"
    )
    options = parser.parse_args(arguments)
    if options.schedulers and not options.rates:
        parser.error("--schedulers needs --rates: several are measured as processes, at given rates")
    if options.rates:
        name = "scheduler-sharing" if options.schedulers else "scheduler-cpu"
        save(name, {"workers": options.workers, "hold_s": options.hold, "arms": shares(options)})
        return
    collect_seldom()  # as the product's own processes do
    results = {}
    for store in options.stores:
        if store == "redis":
            port = free_port()
            with redis_server(port):
                results[store] = uvloop.run(measure(f"redis://127.0.0.1:{port}/0", options))
        else:
            results[store] = uvloop.run(measure(store, options))
    name = "scheduler" if options.workers == FEW else f"scheduler-{options.workers}"
    save(name, {"workers": options.workers, "requests": options.requests, "stores": results})


def shares(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Measure each checkout, or each number of schedulers, at each rate."""
    workers = [_identity(number) for number in range(options.workers)]
    arms = {"here": (ROOT, 1)}
    if options.against:
        arms["against"] = (options.against.resolve(), 1)
    if options.schedulers:
        arms = {str(number): (ROOT, number) for number in options.schedulers}
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in arms}
    for rate in options.rates:
        for name, (code, schedulers) in arms.items():
            figures = scheduler_cpu.measure(rate, options.hold, workers, code, schedulers)
            found[name][str(rate)] = figures
            print(name, ", ".join(f"{key} {value:g}" for key, value in figures.items()), flush=True)
    return found


async def measure(store: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure at each concurrency."""
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    settings = SchedulerSettings(
        address="127.0.0.1:0",
        store=store,
        topic=topic,
        worker_lease_s=600,
        max_queued_prompt_tokens=10**9,
    )
    async with (
        SchedulerServer(settings) as server,
        SchedulerClient(server.address, router_id="bench") as client,
    ):
        for number in range(options.workers):
            await client.register(_identity(number), pb.WORKER_STATE_READY)
        print(f"store {server.store_name}, {options.workers} workers, {options.requests} requests")
        print("concurrency  requests/s  place p50 ms  p99 ms")
        results = {}
        for concurrency in options.concurrency:
            began = time.perf_counter()
            latencies = await _round(client, options.requests, concurrency)
            took = time.perf_counter() - began
            await _all_released(client)
            cuts = statistics.quantiles([1_000 * one for one in latencies], n=100)
            rate = options.requests / took
            print(f"{concurrency:>11}  {rate:>10.0f}  {cuts[49]:>12.2f}  {cuts[98]:>6.2f}")
            results[str(concurrency)] = {
                "requests_per_s": round(rate),
                "place_p50_ms": round(cuts[49], 2),
                "place_p99_ms": round(cuts[98], 2),
            }
        return results


async def _round(client: SchedulerClient, requests: int, concurrency: int) -> list[float]:
    """Return the latency of each placement, in seconds."""
    left = iter(range(requests))
    latencies: list[float] = []

    async def router() -> None:
        for _ in left:
            began = time.perf_counter()
            placed = await place(client, uuid.uuid4().hex, 1, 500, 200)
            latencies.append(time.perf_counter() - began)
            client.reporter.prefilled(placed.attempt)
            client.reporter.finished(placed.attempt, "stop", pb.Cost(decode_ms=1.0))

    await asyncio.gather(*(router() for _ in range(concurrency)))
    return latencies


async def _all_released(client: SchedulerClient) -> None:
    deadline = time.monotonic() + 10
    while (await client.describe()).attempts:
        if time.monotonic() > deadline:
            raise SystemExit("reservations are left over: the figures would mean nothing")
        await asyncio.sleep(0.01)
    if client.reporter.dropped:
        raise SystemExit(f"{client.reporter.dropped} events were dropped: the figures would mean nothing")


def _identity(number: int) -> pb.WorkerIdentity:
    return pb.WorkerIdentity(
        worker_id=f"worker-{number}",
        role=pb.ROLE_PREFILL if number % 2 else pb.ROLE_DECODE,
        address="127.0.0.1:1",
        model="bench",
        capacity=pb.Capacity(
            compatibility_hash="aa",
            block_size=16,
            num_blocks=10**6,
            max_num_seqs=10**4,
            max_model_len=8_192,
            lookahead_tokens=4,
            transports=["shm"],
        ),
    )
