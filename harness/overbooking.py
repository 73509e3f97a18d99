"""More requests than a fleet can hold, from many routers: who gets in, and in which order.

    python -m harness.overbooking --seconds 60 --routers 100 --times 3

Two schedulers over a real Redis, routers with their own waiting rooms and clients, and workers without
engines, which admit or refuse as real ones do. All of it is one process, so delays are longer than in a
deployment. Prints JSON.
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
from baton.scheduler.session import WorkerSession
from baton.scheduler.types import Booking
from baton.services.classes import Classes, ServiceClass
from baton.services.config import SchedulerSettings
from baton.services.engine.args import VLLM_VERSION
from baton.services.router.metrics import RouterMetrics
from baton.services.router.placement import Placements
from baton.services.router.recovery import backoff_s
from baton.services.router.state import Party, RequestState
from baton.services.router.waiting import WaitingRoom
from baton.tasks import spawn, stop
from harness.chaos.placed import Workers
from harness.scheduling import Options, RedisServer, capacity, identity
from harness.stats import percentile

PAIRS = 8  # prefill workers, and as many decode workers
CAPACITY = capacity(max_num_seqs=8, num_blocks=2_001, max_model_len=4_096)
PROMPT = (100, 900)  # tokens
READ_S = (0.01, 0.05)
LIFE_S = (0.5, 1.5)
WAIT_S = 120.0  # nobody is sent away for waiting
OLDER_S = 2.0  # a request that is so much older, and of the same class or one before it, goes first

Waiting = dict[str, tuple[str, float]]  # request -> its class, and when it arrived


@dataclass
class Outcome:
    """The fate of the requests."""

    waits: dict[str, list[float]] = field(default_factory=dict)  # by class, seconds
    refused: Counter[str] = field(default_factory=Counter)  # times that workers refused a request
    overtaken: int = 0  # requests placed while an older one of the class waited
    placed: int = 0
    longest: dict[str, float] = field(default_factory=dict)  # wait of those that still wait at the end


class _Router:
    def __init__(self, name: str, addresses: str, workers: Workers, outcome: Outcome) -> None:
        self.name = name
        self.client = SchedulerClient(addresses, router_id=name)
        metrics = RouterMetrics(CollectorRegistry())
        self.placements = Placements(self.client, metrics)
        self.room = WaitingRoom(10_000, WAIT_S, metrics, classes=Classes())
        self.client.reporter.on_released = self.room.freed
        self._workers = workers
        self._outcome = outcome

    async def client_of(
        self, service: ServiceClass, waiting: dict[str, tuple[str, float]], seed: str
    ) -> None:
        """Send one request after the other."""
        draw = random.Random(seed)
        for number in range(1_000_000):
            state = RequestState(
                f"{seed}-{number}",
                "",
                b"",
                prompt_tokens=draw.randint(*PROMPT),
                max_tokens=64,
                max_model_len=CAPACITY.max_model_len,
                deadline=float("inf"),
            )
            state.arrived = time.monotonic()
            waiting[state.request_id] = service.name, state.arrived
            await self._serve(state, service, waiting, draw)

    async def _serve(
        self, state: RequestState, service: ServiceClass, waiting: Waiting, draw: random.Random
    ) -> None:
        got: list[Any] = []

        async def place(as_class: ServiceClass) -> None:
            got[:] = [await self.placements.place(state, self.placements.avoidable(full, ()), as_class)]

        full: set[str] = set()  # workers that refused it
        refused = 0
        await self.room.admit(Party(client=state.request_id), float("inf"), place, service)
        while True:
            placement = got[0]
            prefill = placement.prefill.worker_id if placement.prefill else ""
            booking = Booking(
                placement.attempt,
                self.name,
                prefill,
                placement.decode.worker_id,
                placement.prompt_tokens,
                placement.blocks,
            )
            stay, refusal = self._workers.take(booking, time.monotonic())
            if not refusal:
                break
            refused += 1
            full.add(refusal)
            self.placements.finished(state, placement.attempt, "retried")
            await asyncio.sleep(backoff_s(refused))

            await self.room.resume(WAIT_S, place)
        now = time.monotonic()
        del waiting[state.request_id]
        outcome = self._outcome
        outcome.placed += 1
        outcome.refused[str(refused)] += 1
        outcome.waits.setdefault(service.name, []).append(now - state.arrived)
        outcome.overtaken += any(
            name == service.name and since < state.arrived - OLDER_S for name, since in waiting.values()
        )
        read_s = draw.uniform(*READ_S)
        await asyncio.sleep(read_s)
        self._workers.read(stay, time.monotonic())
        self.placements.prefilled(placement.attempt)
        await asyncio.sleep(draw.uniform(*LIFE_S) - read_s)
        self._workers.end(stay, time.monotonic())
        self.placements.finished(state, placement.attempt, "stop")
        self.room.left(service)


async def overbook(seconds: float, routers: int, times: float, schedulers: int = 2) -> dict[str, Any]:
    """Return the figures of so many seconds with `times` as many requests as the workers can hold."""
    outcome, limits = Outcome(), SchedulerSettings()
    workers = Workers(CAPACITY, limits)
    waiting: Waiting = {}
    async with AsyncExitStack() as stack:
        redis = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        redis.start()
        stack.callback(redis.stop)
        options = Options(
            store=redis.url,
            heartbeat_s=1.0,
            worker_lease_s=30.0,  # all of it shares one process
            max_queued_prompt_tokens=limits.max_queued_prompt_tokens,
            max_queue_factor=limits.max_queue_factor,
        )
        servers = [await stack.enter_async_context(SchedulerServer(options)) for _ in range(schedulers)]
        for server in servers:
            server.members.introduce(pb.Process(id=server.address, kind="scheduler", metrics_address="-"))
        addresses = ",".join(server.address for server in servers)
        for number in range(2 * PAIRS):
            role = pb.ROLE_PREFILL if number % 2 else pb.ROLE_DECODE
            client = await stack.enter_async_context(SchedulerClient(addresses))
            who = identity(f"worker-{number}", role, vllm=VLLM_VERSION)
            session = WorkerSession(client, who, pb.WorkerLoad)
            stack.push_async_callback(session.close)
            await session.start(10.0)
            await session.ready(CAPACITY)
        made = [_Router(f"router-{number}", addresses, workers, outcome) for number in range(routers)]
        for router in made:
            await router.client.refresh()
        held = int(PAIRS * CAPACITY.max_num_seqs * limits.max_queue_factor)
        services = list(Classes())
        tasks = []
        for number in range(int(times * held)):
            router, service = made[number % routers], services[number // routers % len(services)]
            work = router.client_of(service, waiting, f"{router.name}-{number}")
            tasks.append(spawn(work, f"client {number}"))
        await asyncio.sleep(seconds)
        now = time.monotonic()
        for name, since in waiting.values():
            outcome.longest[name] = max(outcome.longest.get(name, 0.0), now - since)
        failed = sum(task.done() for task in tasks)
        for task in tasks:
            await stop(task)
        await asyncio.gather(*(router.client.close() for router in made))
    return {
        "seconds": seconds,
        "routers": routers,
        "schedulers": schedulers,
        "held": held,
        "clients": int(times * held),
        "placed": outcome.placed,
        "failed": failed,
        "fullest": round(workers.fullest, 3),
        "refused by workers, times": dict(sorted(outcome.refused.items())),
        "overtaken": outcome.overtaken,
        "waits_s": {
            name: {
                "count": len(waits),
                "p50": round(percentile(waits, 0.5), 2),
                "p99": round(percentile(waits, 0.99), 2),
                "max": round(max(waits), 2),
                "still waiting, longest": round(outcome.longest.get(name, 0.0), 2),
            }
            for name, waits in outcome.waits.items()
        },
    }


def main() -> None:
    """Run one, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--routers", type=int, default=100)
    parser.add_argument("--times", type=float, default=3.0, help="as many requests as the fleet can hold")
    parser.add_argument("--schedulers", type=int, default=2)
    args = parser.parse_args()
    figures = asyncio.run(overbook(args.seconds, args.routers, args.times, args.schedulers))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
