"""Many routers with three times as many requests as the workers can hold.

The schedulers, Redis, the routers' waiting rooms and the workers' admission are real; there are no engines.
"""

import asyncio
import math
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.services.classes import Classes
from baton.services.config import SchedulerSettings
from baton.services.router.metrics import RouterMetrics
from baton.services.router.placement import Placements
from baton.services.router.recovery import backoff_s
from baton.services.router.state import Party
from baton.services.router.waiting import WaitingRoom
from baton.tasks import spawn, stop
from harness.chaos.placing import PROMPT, booking_of, register, request
from harness.chaos.placing_judge import Workers
from harness.scheduling import Options, RedisServer, capacity, until

PAIRS = 8  # prefill workers and as many decode workers
CAPACITY = capacity(max_num_seqs=8, num_blocks=2_001, max_model_len=4_096)
LIMITS = SchedulerSettings()
ROUTERS, TIMES = 12, 3
PLACED = 200  # more than twice what the workers can hold
READ_S, LIFE_S = (0.01, 0.05), (0.5, 1.5)
WAIT_S = 120.0  # so long that no request is refused for waiting


@dataclass
class Outcome:
    workers: Workers = field(default_factory=lambda: Workers(CAPACITY, LIMITS))
    refused: Counter[int] = field(default_factory=Counter)  # refusals by workers -> requests

    @property
    def placed(self):
        return self.refused.total()


class Router:
    def __init__(self, name, addresses, outcome):
        self.name, self._outcome = name, outcome
        self.client = SchedulerClient(addresses, router_id=name)
        metrics = RouterMetrics(CollectorRegistry())
        self._placements = Placements(self.client, metrics)
        self._room = WaitingRoom(10_000, WAIT_S, metrics, classes=Classes())
        self.client.reports.on_released = self._room.freed

    async def client_of(self, service, seed):
        draw, number = random.Random(seed), 0
        while True:
            number += 1
            await self._serve(request(f"{seed}-{number}", draw.randint(*PROMPT), 64), service, draw)

    async def _serve(self, state, service, draw):
        got = []
        full = set()  # workers that refused the request

        async def place(as_class):
            got[:] = [await self._placements.place(state, self._placements.avoidable(full, ()), as_class)]

        await self._room.admit(Party(client=state.request_id), math.inf, place, service)
        refused = 0
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
        self._outcome.refused[refused] += 1
        await asyncio.sleep(draw.uniform(*READ_S))
        self._outcome.workers.prefilled(stay, time.monotonic())
        self._placements.reports.prefilled(placement.attempt)
        await asyncio.sleep(draw.uniform(*LIFE_S))
        self._outcome.workers.end(stay, time.monotonic())
        self._placements.finished(state, placement.attempt, "stop")
        self._room.left(service)


async def overbook(folder, schedulers):
    outcome = Outcome()
    async with AsyncExitStack() as stack:
        options = Options(
            store=stack.enter_context(RedisServer(folder)).url,
            heartbeat_s=1.0,
            worker_lease_s=30.0,  # long, because everything shares one process
            max_queued_prompt_tokens=LIMITS.max_queued_prompt_tokens,
            max_queue_factor=LIMITS.max_queue_factor,
        )
        servers = [await stack.enter_async_context(SchedulerServer(options)) for _ in range(schedulers)]
        for server in servers:
            server.introduce(pb.Process(id=server.address, kind="scheduler", metrics_address="-"))
        addresses = ",".join(server.address for server in servers)
        await register(stack, addresses, 2 * PAIRS, CAPACITY)
        routers = [Router(f"router-{number}", addresses, outcome) for number in range(ROUTERS)]
        for router in routers:
            stack.push_async_callback(router.client.close)
            await router.client.refresh()
        services = list(Classes())
        tasks = []
        for number in range(int(TIMES * PAIRS * CAPACITY.max_num_seqs * LIMITS.max_queue_factor)):
            router, service = routers[number % ROUTERS], services[number // ROUTERS % len(services)]
            tasks.append(spawn(router.client_of(service, f"{router.name}-{number}"), f"client {number}"))
        await until(lambda: outcome.placed >= PLACED, 10.0)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            await stop(task)
    assert outcome.workers.fullest == 1.0  # full but not overbooked
    return outcome


async def test_nobody_is_overbooked(tmp_path):
    outcome = await overbook(tmp_path, schedulers=1)
    assert list(outcome.refused) == [0]


async def test_workers_refuse_few_requests_of_two_schedulers(tmp_path):
    outcome = await overbook(tmp_path, schedulers=2)
    again = sum(count for times, count in outcome.refused.items() if times >= 2)
    assert again < 0.2 * outcome.placed
