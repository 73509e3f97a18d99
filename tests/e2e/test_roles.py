"""Workers change roles under load: no request fails, no token differs, and one role covers for the other."""

import asyncio
import itertools
import random

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from harness.deployment import MODEL_NAME, deployment, idle
from harness.fake_worker import until
from harness.greedy import ask
from harness.prompts import prompts
from harness.support import CALL_S, QUICK, eventually, freeze

FLIPS = 4
AT_ONCE = 4  # requests
PROMPTS, TOKENS = 6, 16  # prompts of the load, and tokens of an answer
ROLES = (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED)


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """Start 1P2D. Tests leave it with these roles."""
    with deployment(tmp_path_factory.mktemp("trio")) as one:
        yield one.up(1, 2)


def roles(one):
    return {worker.identity.worker_id: worker.identity.role for worker in one.describe().workers}


async def asked_under_way(one, stop, got):
    """Send requests, AT_ONCE at a time, until `stop` is set. Add each (prompt index, answer) to `got`."""
    numbers = itertools.cycle(range(PROMPTS))

    async def one_after_another(client):
        while not stop.is_set():
            number = next(numbers)
            got.append((number, await ask(client, prompts()[number * 4], max_tokens=TOKENS)))

    async with one.async_client() as client:
        await asyncio.gather(*(one_after_another(client) for _ in range(AT_ONCE)))


async def one_more(load, got):
    before = len(got)
    await until(lambda: load.done() or len(got) > before, "one more answer", CALL_S)
    assert not load.done(), load.result()


@pytest.mark.timeout(180)
async def test_roles_flip_under_load(trio):
    async with trio.async_client() as client:
        expected = [await ask(client, prompts()[number * 4], max_tokens=TOKENS) for number in range(PROMPTS)]
    before = roles(trio)
    draw = random.Random(5)
    stop = asyncio.Event()
    got = []
    load = asyncio.create_task(asked_under_way(trio, stop, got))
    seen = set()
    async with SchedulerClient(trio.scheduler_address) as operator:
        for _ in range(FLIPS):
            worker = draw.choice(sorted(before))
            was = roles(trio)[worker]
            reply = await operator.set_role(worker, draw.choice([role for role in ROLES if role != was]))
            assert reply.problem == ""
            seen.add(tuple(sorted(roles(trio).values())))
            await one_more(load, got)  # answered by the changed fleet
        for worker, role in before.items():
            assert (await operator.set_role(worker, role)).problem == ""
    stop.set()
    await load
    wrong = [number for number, answer in got if answer != expected[number]]
    print(f"{FLIPS} role changes under {len(got)} requests: {len(wrong)} wrong, {len(seen)} different fleets")
    assert not wrong
    assert len(seen) > 2
    assert len(got) > FLIPS  # one after each change, and the last ones in flight
    eventually(lambda: idle(trio), 20, "the deployment is idle")


@pytest.mark.timeout(120)
async def test_an_operator_changes_a_role(trio):
    """All three workers are decode workers for a while and do all the work."""
    (reader,) = [worker for worker, role in roles(trio).items() if role == pb.ROLE_PREFILL]
    done = await asyncio.to_thread(trio.baton, "role", reader, "decode")
    assert done.returncode == 0, done.stderr
    assert f"{reader} is a decode worker now" in done.stdout
    assert set(roles(trio).values()) == {pb.ROLE_DECODE}
    async with trio.async_client() as client:
        alone = await ask(client, prompts()[8], max_tokens=20)
        done = await asyncio.to_thread(trio.baton, "role", reader, "prefill")
        assert done.returncode == 0, done.stderr
        assert await ask(client, prompts()[8], max_tokens=20) == alone
    refused = await asyncio.to_thread(trio.baton, "role", "x", "decode")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no worker's id begins with 'x'; there are: decode-0." in refused.stderr


def operator(one, *command):
    """Run an operator's command, which must succeed, and return its output."""
    done = one.baton(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_a_drained_worker_takes_nothing_until_it_is_undrained(trio):
    """`baton up` restarts it, and it takes no requests until `baton undrain`."""
    (reader,) = [worker for worker, role in roles(trio).items() if role == pb.ROLE_PREFILL]
    told = operator(trio, "drain", reader)
    assert f"{reader} is draining" in told

    def comes_back():
        again = [one for one in trio.describe().workers if one.identity.name == "prefill-0"]
        ids = [one.identity.worker_id for one in again if one.drained and one.identity.HasField("capacity")]
        return "".join(key for key in ids if key != reader)

    again = eventually(comes_back, 60, "the restarted worker has loaded")
    line = next(line for line in operator(trio, "status").splitlines() if again in line)
    assert line.split()[2] == "drained"
    answer = trio.client().completions.create(model=MODEL_NAME, prompt="def main(", max_tokens=4)
    assert answer.usage is not None

    def reported():
        return [one for one in trio.describe().handoffs if answer.id in one.attempt.request_id]

    (mine,) = eventually(reported, 10, "the request is reported")
    assert mine.prefill_worker_id == ""  # a decode worker prefilled
    assert "prefill-0 takes requests again" in operator(trio, "undrain", "prefill")
    eventually(lambda: trio.workers("prefill"), 10, "it is ready")
    trio.client().completions.create(model=MODEL_NAME, prompt="class Lamp:", max_tokens=4)
    eventually(lambda: trio.describe().handoffs[0].prefill_worker_id == again, 10, "it has prefilled")
    log = trio.processes["up"].text
    assert "prefill-0    exited after a drain; restarted" in log
    assert "died" not in log


@pytest.mark.timeout(120)
async def test_a_prefill_worker_covers_for_lost_decode_workers(trio):
    """Both decode workers hang for longer than their leases."""
    decode = [trio.worker_process(one["identity"]["worker_id"]) for one in trio.workers("decode")]
    assert len(decode) == 2

    def decoded_by():
        return trio.describe().handoffs[0].decode_worker_id

    async with trio.async_client() as client:
        expected = await ask(client, prompts()[8], max_tokens=20)
        for process in decode:
            freeze(process.pid)
        try:
            await until(lambda: not trio.workers("decode"), "the decode workers are lost", CALL_S)
            assert await ask(client, prompts()[8], max_tokens=20) == expected
            await until(lambda: decoded_by().startswith("prefill-"), "the prefill worker has decoded")
        finally:
            for process in decode:
                process.resume()
        await until(lambda: len(trio.workers("decode")) == 2, "the decode workers are back", CALL_S)
        while not decoded_by().startswith("decode-"):
            assert await ask(client, prompts()[8], max_tokens=20) == expected


@pytest.mark.timeout(180)
async def test_the_scheduler_balances_by_itself(tmp_path_factory):
    config = {
        "engine": {"max_num_batched_tokens": 128},  # so that a prompt takes many steps
        "autoscale": {"mode": "roles"},
        "constants": {**QUICK, "baton.scheduler.service:BALANCE_AFTER_S": 1.0},
    }
    with deployment(tmp_path_factory.mktemp("balance"), **config) as one:
        one.up(1, 2)
        draw = random.Random(6)
        stop = asyncio.Event()

        def changed():
            return list(roles(one).values()).count(pb.ROLE_PREFILL) == 2

        async def read_only(client):
            while not stop.is_set():
                await ask(client, [draw.randrange(10, 500) for _ in range(300)], max_tokens=2)

        async with one.async_client() as client:
            load = [asyncio.create_task(read_only(client)) for _ in range(6)]
            await asyncio.to_thread(eventually, changed, 60, "a decode worker becomes a prefill worker")
            stop.set()
            await asyncio.gather(*load)
        assert "changes to prefill" in (one.folder / "logs" / "scheduler.log").read_text()
        eventually(lambda: idle(one), 20, "the deployment is idle")
