"""Two schedulers over Redis under `baton up`: one is stopped, one is killed, and no request fails."""

import asyncio
import signal

import pytest

from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from harness.deployment import MODEL_NAME, START_S, deployment
from harness.greedy import GREEDY, Load, ask
from harness.prompts import prompts
from harness.scheduling import RedisServer, until
from harness.scrape import total
from harness.support import PATIENCE, free_port, freeze, listener

CLIENTS = 3
MORE = 5  # answers in each phase
TOKENS = 4
PAUSE_S = 1.5  # timeout of a call to a stopped scheduler, after which the router asks the other one
CONSTANTS = {"baton.scheduler.exchange:PLACE_TIMEOUT_S": PAUSE_S, "baton.scheduler.endpoints:BACK_S": 1.0}


async def disturb(one, ports):
    both = ",".join(f"127.0.0.1:{port}" for port in ports)
    async with one.async_client() as client, SchedulerClient(both) as operator:
        expected = [await ask(client, prompts()[which], TOKENS) for which in range(CLIENTS)]
        load = Load(client, expected, CLIENTS)
        await load.more(MORE)
        told = await operator.describe()
        assert len(told.schedulers) == 2
        paused = listener(ports[1])
        freeze(paused.pid)
        await load.more(MORE)
        paused.send_signal(signal.SIGCONT)
        await load.more(MORE)
        killed = listener(ports[0])
        killed.kill()
        await load.more(MORE)

        async def restarted():
            try:
                told = await operator.describe()
            except SchedulerError:
                return False
            return len(told.schedulers) == 2 and len(told.routers) == 1

        await until(restarted, 30)
        home = operator._schedulers.owner((await operator.describe()).routers[0].router_id).address

        async def placements():
            told = (await operator.describe()).schedulers
            return next((each.placements for each in told if each.address == home), 0)

        before = await placements()

        async def at_home():
            return await placements() > before

        await until(at_home, 30)

        async def all_know_the_worker():
            return all([len((await alone.describe()).workers) == 1 for alone in each])

        async with (
            SchedulerClient(f"127.0.0.1:{ports[0]}") as first,
            SchedulerClient(f"127.0.0.1:{ports[1]}") as second,
        ):
            each = first, second
            await until(all_know_the_worker, 30)
        await load.end()
        assert load.longest_s < (PAUSE_S + 2) * PATIENCE

        async def nothing_is_held():
            told = await operator.describe()
            return not told.attempts and not any(each.reserved_requests for each in told.workers)

        await until(nothing_is_held, 10)


@pytest.mark.timeout(180)
def test_requests_continue_while_schedulers_hang_and_die(tmp_path):
    redis, ports = RedisServer(tmp_path), (free_port(), free_port())
    scheduler = {"store": redis.url, "address": ",".join(f"127.0.0.1:{port}" for port in ports)}
    with redis, deployment(tmp_path / "baton", scheduler=scheduler, constants=CONSTANTS) as one:
        one.up(0, 0, 1, "--schedulers", "2")
        warm = one.client(timeout=START_S).completions
        warm.create(model=MODEL_NAME, prompt=prompts()[4], max_tokens=2 * TOKENS, **GREEDY)
        asyncio.run(disturb(one, ports))
        # From its snapshot, if the stopped scheduler has not answered again when the other one dies.
        kinds = ("moved", "without_scheduler")
        assert sum(total(one.url, f"baton_router_placements_{kind}_total") for kind in kinds) > 0
