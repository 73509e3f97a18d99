"""Send more requests than a fleet can hold from many routers, and measure who is admitted in which order.

    python -m harness.overbooking --seconds 60 --routers 100 --times 3

Runs two schedulers over a real Redis, routers with waiting rooms and clients, and workers without engines
that admit or refuse as real ones do. All share one process, so delays are longer than in a deployment. Prints
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.services.classes import Classes, ServiceClass
from baton.services.config import SchedulerSettings
from baton.services.router.metrics import RouterMetrics
from baton.services.router.placement import Placements
from baton.services.router.recovery import backoff_s
from baton.services.router.state import Party, RequestState
from baton.services.router.waiting import WaitingRoom
from baton.tasks import spawn, stop
from harness.chaos.placed import Workers
from harness.chaos.placing import PROMPT, booking_of, register, request
from harness.scheduling import Options, RedisServer, capacity
from harness.stats import percentile

PAIRS = 8  # prefill workers and as many decode workers
CAPACITY = capacity(max_num_seqs=8, num_blocks=2_001, max_model_len=4_096)
ANSWER = 64  # tokens
READ_S = (0.01, 0.05)
LIFE_S = (0.5, 1.5)
WAIT_S = 120.0  # so long that no request is refused for waiting
OLDER_S = 2.0  # a request overtakes one that is older by this


@dataclass
class Outcome:
    workers: Workers
    waiting: dict[str, tuple[str, float]] = field(default_factory=dict)  # request -> class, arrival
    waits: dict[str, list[float]] = field(default_factory=dict)  # by class, seconds
    refused: Counter[int] = field(default_factory=Counter)  # refusals by workers -> requests
    overtaken: int = 0  # requests placed while an older one of their class waited
    placed: int = 0


class _Router:
    def __init__(self, name: str, addresses: str, outcome: Outcome) -> None:
        self.name = name
        self.client = SchedulerClient(addresses, router_id=name)
        metrics = RouterMetrics(CollectorRegistry())
        self._placements = Placements(self.client, metrics)
        self._room = WaitingRoom(10_000, WAIT_S, metrics, classes=Classes())
        self.client.reporter.on_released = self._room.freed
        self._outcome = outcome

    async def client_of(self, service: ServiceClass, seed: str) -> None:
        draw = random.Random(seed)
        for number in range(1_000_000):
            state = request(f"{seed}-{number}", draw.randint(*PROMPT), ANSWER)
            state.arrived = time.monotonic()
            self._outcome.waiting[state.request_id] = service.name, state.arrived
            await self._serve(state, service, draw)

    async def _serve(self, state: RequestState, service: ServiceClass, draw: random.Random) -> None:
        got: list[Any] = []
        full: set[str] = set()  # workers that refused the request
        refused = 0

        async def place(as_class: ServiceClass) -> None:
            got[:] = [await self._placements.place(state, self._placements.avoidable(full, ()), as_class)]

        await self._room.admit(Party(client=state.request_id), float("inf"), place, service)
        while True:
            (placement,) = got
            booking = booking_of(self.name, state, placement, CAPACITY)
            stay, refusal = self._outcome.workers.take(booking, time.monotonic())
            if not refusal:
                break
            refused += 1
            full.add(refusal)
            self._placements.finished(state, placement.attempt, "retried")
            await asyncio.sleep(backoff_s(refused))
            await self._room.resume(WAIT_S, place)
        self._admitted(state, service, refused)
        read_s = draw.uniform(*READ_S)
        await asyncio.sleep(read_s)
        self._outcome.workers.prefilled(stay, time.monotonic())
        self._placements.reporter.prefilled(placement.attempt)
        await asyncio.sleep(draw.uniform(*LIFE_S) - read_s)
        self._outcome.workers.end(stay, time.monotonic())
        self._placements.finished(state, placement.attempt, "stop")
        self._room.left(service)

    def _admitted(self, state: RequestState, service: ServiceClass, refused: int) -> None:
        outcome = self._outcome
        del outcome.waiting[state.request_id]
        outcome.placed += 1
        outcome.refused[refused] += 1
        outcome.waits.setdefault(service.name, []).append(time.monotonic() - state.arrived)
        outcome.overtaken += any(
            name == service.name and since < state.arrived - OLDER_S
            for name, since in outcome.waiting.values()
        )


async def overbook(seconds: float, routers: int, times: float, schedulers: int = 2) -> dict[str, Any]:
    """Run `times` as many requests as the workers can hold and return the figures."""
    limits = SchedulerSettings()
    outcome = Outcome(Workers(CAPACITY, limits))
    async with AsyncExitStack() as stack:
        redis = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        redis.start()
        stack.callback(redis.stop)
        options = Options(
            store=redis.url,
            heartbeat_s=1.0,
            worker_lease_s=30.0,  # long, because everything shares one process
            max_queued_prompt_tokens=limits.max_queued_prompt_tokens,
            max_queue_factor=limits.max_queue_factor,
        )
        servers = [await stack.enter_async_context(SchedulerServer(options)) for _ in range(schedulers)]
        for server in servers:
            server.members.introduce(pb.Process(id=server.address, kind="scheduler", metrics_address="-"))
        addresses = ",".join(server.address for server in servers)
        await register(stack, addresses, 2 * PAIRS, CAPACITY)
        made = [_Router(f"router-{number}", addresses, outcome) for number in range(routers)]
        for router in made:
            await router.client.refresh()
        held = int(PAIRS * CAPACITY.max_num_seqs * limits.max_queue_factor)
        services = list(Classes())
        tasks = []
        for number in range(int(times * held)):
            router, service = made[number % routers], services[number // routers % len(services)]
            tasks.append(spawn(router.client_of(service, f"{router.name}-{number}"), f"client {number}"))
        await asyncio.sleep(seconds)
        longest: dict[str, float] = {}
        for name, since in outcome.waiting.values():
            longest[name] = max(longest.get(name, 0.0), time.monotonic() - since)
        failed = sum(task.done() for task in tasks)
        for task in tasks:
            await stop(task)
        await asyncio.gather(*(router.client.close() for router in made))
    return {
        "seconds": seconds,
        "routers": routers,
        "schedulers": schedulers,
        "held": held,
        "clients": len(tasks),
        "placed": outcome.placed,
        "failed": failed,
        "fullest": round(outcome.workers.fullest, 3),
        "refused by workers, times": {str(times): count for times, count in sorted(outcome.refused.items())},
        "overtaken": outcome.overtaken,
        "waits_s": {
            name: {
                "count": len(waits),
                "p50": round(percentile(waits, 0.5), 2),
                "p99": round(percentile(waits, 0.99), 2),
                "max": round(max(waits), 2),
                "still waiting, longest": round(longest.get(name, 0.0), 2),
            }
            for name, waits in outcome.waits.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--routers", type=int, default=100)
    parser.add_argument("--times", type=float, default=3.0, help="requests, in times the fleet's capacity")
    parser.add_argument("--schedulers", type=int, default=2)
    args = parser.parse_args()
    figures = asyncio.run(overbook(args.seconds, args.routers, args.times, args.schedulers))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
