"""Two schedulers over Redis under `baton up`: one is stopped, one is killed, and no request fails."""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from harness.deployment import MODEL_NAME, START_S, Deployment, deployment
from harness.prompts import prompts
from harness.scheduling import RedisServer, until
from harness.support import PATIENCE, free_port

CLIENTS = 3
MORE = 8  # answers in each phase
TOKENS = 4
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
PAUSE_S = 3.0  # timeout of a call to a stopped scheduler, after which the router asks the other one


def listener(port: int) -> psutil.Process:
    connections = psutil.net_connections("tcp")
    return psutil.Process(
        next(one.pid for one in connections if one.status == psutil.CONN_LISTEN and one.laddr[1:] == (port,))
    )


async def ask(client: openai.AsyncOpenAI, prompt: list[int]) -> list[int]:
    done = await client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=TOKENS, **GREEDY)
    ids: list[int] = (done.choices[0].model_extra or {})["token_ids"]
    return ids


class Load:
    """Clients that send requests without a pause. `more` raises if a request fails or a token is wrong."""

    def __init__(self, client: openai.AsyncOpenAI, expected: list[list[int]]) -> None:
        self._client = client
        self._expected = expected
        self._ending = False
        self._answered = 0
        self.longest_s = 0.0
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(CLIENTS)]

    async def _run(self, number: int) -> None:
        while not self._ending:
            began = time.monotonic()
            which = number % len(self._expected)
            assert await ask(self._client, prompts()[which]) == self._expected[which]
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self._answered += 1
            number += CLIENTS

    async def more(self) -> None:
        wanted = self._answered + MORE

        async def answered() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return self._answered >= wanted

        await until(answered, 30)

    async def end(self) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)


async def disturb(one: Deployment, ports: tuple[int, int]) -> None:
    both = ",".join(f"127.0.0.1:{port}" for port in ports)
    async with one.async_client() as client, SchedulerClient(both) as operator:
        load = Load(client, [await ask(client, prompts()[which]) for which in range(CLIENTS)])
        await load.more()
        told = await operator.describe()
        assert len(told.schedulers) == 2
        paused = listener(ports[1])
        paused.send_signal(signal.SIGSTOP)
        await load.more()
        paused.send_signal(signal.SIGCONT)
        await load.more()
        killed = listener(ports[0])
        killed.kill()
        await load.more()

        async def restarted() -> bool:
            try:
                told = await operator.describe()
            except SchedulerError:
                return False
            return len(told.schedulers) == 2 and len(told.routers) == 1

        await until(restarted, 30)
        home = operator._schedulers.owner((await operator.describe()).routers[0].router_id).address

        async def placements() -> int:
            told = (await operator.describe()).schedulers
            return next((each.placements for each in told if each.address == home), 0)

        before = await placements()

        async def at_home() -> bool:
            return await placements() > before

        await until(at_home, 30)

        async def all_know_the_worker() -> bool:
            return all([len((await alone.describe()).workers) == 1 for alone in each])

        async with (
            SchedulerClient(f"127.0.0.1:{ports[0]}") as first,
            SchedulerClient(f"127.0.0.1:{ports[1]}") as second,
        ):
            each = first, second
            await until(all_know_the_worker, 30)
        await load.end()
        assert load.longest_s < (PAUSE_S + 2) * PATIENCE

        async def nothing_is_held() -> bool:
            told: pb.Description = await operator.describe()
            return not told.attempts and not any(each.reserved_requests for each in told.workers)

        await until(nothing_is_held, 10)


@pytest.mark.timeout(180)
def test_requests_go_on_while_schedulers_stand_still_and_die(tmp_path: Path) -> None:
    redis, ports = RedisServer(tmp_path), (free_port(), free_port())
    redis.start()
    scheduler = {"store": redis.url, "address": ",".join(f"127.0.0.1:{port}" for port in ports)}
    try:
        with deployment(tmp_path / "baton", scheduler=scheduler) as one:
            one.up(0, 0, 1, "--schedulers", "2")
            warm = one.client(timeout=START_S).completions
            warm.create(model=MODEL_NAME, prompt=prompts()[4], max_tokens=2 * TOKENS, **GREEDY)
            asyncio.run(disturb(one, ports))
            with urllib.request.urlopen(f"{one.url}/metrics") as answer:
                lines = answer.read().decode().splitlines()
            moved = next(line for line in lines if line.startswith("baton_router_placements_moved_total"))
            assert float(moved.split()[-1]) > 0
    finally:
        redis.stop()
