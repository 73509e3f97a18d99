"""`baton up` with gangs: two workers each that compute a mixture of experts together."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from baton.protos import worker_pb2, worker_pb2_grpc
from harness.architectures.experts import deepseek_v3
from harness.architectures.language import prompt
from harness.deployment import deployment
from harness.gangs import plain_answers
from harness.greedy import ask
from harness.support import CALL_S, PATIENCE, QUICK, eventually, gone

WRITTEN, LONG = 16, 160
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
GANG = {"data_parallel_size": 2, "expert_parallel": True}


def members(one):
    """Return the ids of the gang's workers, if it is whole."""
    found = {worker["identity"]["worker_id"]: worker["identity"]["gang"] for worker in one.workers("decode")}
    lives = {gang["life"] for gang in found.values()}
    return set(found) if len(found) == 2 and len(lives) == 1 else set()


def told(one):
    """Return the lives of gangs that the decode workers tell a router."""
    lives = set()
    for worker in one.workers("decode"):
        with grpc.insecure_channel(worker["identity"]["address"]) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            lives.add(stub.Hello(worker_pb2.HelloRequest(), timeout=CALL_S).identity.gang.life)
    return lives


@dataclass
class Case:
    model: Path
    prompts: list[list[int]]
    expected: list[list[int]]  # a plain engine's answers

    def deployment(self, folder, **config):
        engine = {"model": str(self.model), "tool_call_parser": None} | MTP
        return deployment(folder, engine=engine, **config)

    async def check(self, client, *numbers):
        asked = (ask(client, self.prompts[number], len(self.expected[number])) for number in numbers)
        assert await asyncio.gather(*asked) == [self.expected[number] for number in numbers]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    model = tmp_path_factory.mktemp("gangs") / "model"
    deepseek_v3(model)
    prompts = [prompt(number) for number in range(4)]
    return Case(model, prompts, plain_answers(model, prompts, (LONG, *[WRITTEN] * 3), **MTP))


@pytest.mark.timeout(300)
def test_gangs_over_tls_answer_like_one_engine_and_come_back(case, tmp_path):
    fleet = {"engines": {"prefill": GANG, "decode": GANG}}
    security = {"tls": True, "ca": str(tmp_path / "ca")}
    with case.deployment(tmp_path / "up", fleet=fleet, security=security, constants=QUICK) as one:
        one.up(1, 1, 0)
        first = eventually(lambda: members(one), CALL_S, "the gang is whole")

        async def run():
            async with one.async_client() as client:
                await case.check(client, 1, 2, 3, 1)
                long = asyncio.create_task(case.check(client, 0))
                await asyncio.to_thread(busy, one)
                await asyncio.to_thread(kill_one, one, first)
                await long
                second = await asyncio.to_thread(again, one, first)
                await case.check(client, 1, 2, 3)
                long = asyncio.create_task(case.check(client, 0))
                await asyncio.to_thread(busy, one)
                processes = [one.worker_process(name) for name in second]
                await asyncio.to_thread(one.baton, "drain", "decode-0")
                await long  # both finish it before they exit
                await asyncio.to_thread(eventually, lambda: gone(processes), CALL_S, "both have drained")
                undrained = await asyncio.to_thread(one.baton, "undrain", "decode-0")
                assert undrained.returncode == 0, undrained.stderr
                await asyncio.to_thread(again, one, second)
                long = asyncio.create_task(case.check(client, 0))
                await asyncio.to_thread(busy, one)
                for role in ("prefill", "decode"):  # both workers, while they compute
                    turned = await asyncio.to_thread(one.baton, "role", "decode-0", role)
                    assert f"decode-0 is a {role} worker now" in turned.stdout, turned.stderr
                    assert len(one.workers(role)) == (4 if role == "prefill" else 2)
                    await case.check(client, 1, 2)
                await long

        asyncio.run(run())
        assert "died" in one.processes["up"].text
        assert one.processes["up"].text.count("exited after a drain") == 2


@pytest.mark.timeout(300)
@pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="set WHOLE_TABLE: four engines on a busy machine")
def test_a_second_gang_comes_and_goes_with_the_load(case, tmp_path):
    config = {
        "scheduler": {"worker_lease_s": 2.0},
        "autoscale": {"mode": "on", "prefill": "1-1", "decode": "1-2"},
        "constants": {"baton.services.fleet.goals:DOWN_AFTER_S": 3.0},
        "fleet": {"engines": {"decode": {**GANG, "max_num_seqs": 4}}},
    }
    with case.deployment(tmp_path / "up", **config) as one:
        one.up(1, 1, 0)
        assert told(one) == {worker["identity"]["gang"]["life"] for worker in one.workers("decode")}

        async def load(client, until):
            while not until.is_set():
                await case.check(client, 0)

        def computing():
            return sum(bool(worker["load"].get("running")) for worker in one.workers("decode")) == 4

        def log():
            return one.processes["up"].text

        async def run():
            much, all_of_it = asyncio.Event(), asyncio.Event()
            async with one.async_client() as client:
                tasks = [asyncio.create_task(load(client, much)) for _ in range(14)]
                tasks += [asyncio.create_task(load(client, all_of_it)) for _ in range(2)]
                await asyncio.to_thread(eventually, computing, 4 * CALL_S, "both gangs compute")
                much.set()
                await asyncio.to_thread(
                    eventually, lambda: log().count(" ended") == 2, CALL_S, "one has drained"
                )
                all_of_it.set()
                await asyncio.gather(*tasks)

        asyncio.run(run())
        assert len(members(one)) == 2
        for said in ("ordered: decode worker", "no longer ordered: draining"):
            assert said in log()
        assert "died" not in log()


def busy(one):
    def running():
        return any(worker["load"].get("running") for worker in one.workers("decode"))

    eventually(running, CALL_S, "a decode worker computes", 0.01)


def kill_one(one, workers):
    """Kill a member: all must be gone within a second."""
    processes = [one.worker_process(name) for name in sorted(workers)]
    processes[1].kill()
    began = time.monotonic()
    eventually(lambda: gone(processes), CALL_S, "all have ended", 0.01)
    assert time.monotonic() - began < 3.0 * PATIENCE


def again(one, before):
    """Wait for the gang's next life."""

    def found():
        now = members(one)
        return now if not now & before else set()

    return eventually(found, CALL_S, "the gang is whole again")
