"""A client's placements, several in a call, against a real scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler import place_calls
from baton.scheduler.client import SchedulerClient
from baton.scheduler.endpoints import Endpoint, Endpoints
from baton.scheduler.errors import SchedulerUnavailable
from baton.scheduler.need import need_to_wire
from baton.scheduler.place_calls import MOST, PlaceCalls
from baton.scheduler.service import SchedulerServer
from harness.scheduling import Options, identity, need, place, until
from harness.support import free_port


class Line(Endpoints):
    """Notes how many placements each call carries; calls wait while `held` is clear."""

    def __init__(self, addresses: str) -> None:
        super().__init__(addresses)
        self.sizes: list[int] = []
        self.held = asyncio.Event()
        self.held.set()
        self.answered: Callable[[], object] = lambda: None

    async def ask(self, endpoint: Endpoint, method: str, request: Any, timeout_s: float) -> Any:
        self.sizes.append(len(request.needs))
        await self.held.wait()
        reply = await super().ask(endpoint, method, request, timeout_s)
        self.answered()
        return reply


def asked(name: str, prompt_tokens: int = 1) -> pb.Need:
    return need_to_wire(need(name, 1, prompt_tokens, 1))


@pytest.fixture
async def operator() -> AsyncIterator[SchedulerClient]:
    async with SchedulerServer(Options()) as server, SchedulerClient(server.address) as client:
        await client.register(identity("m", num_blocks=10_000, max_num_seqs=1_000), pb.WORKER_STATE_READY)
        yield client


@pytest.fixture
async def line(operator: SchedulerClient) -> AsyncIterator[Line]:
    made = Line(operator.address)
    yield made
    await made.close()


async def booked(operator: SchedulerClient) -> list[str]:
    return sorted(one.attempt.request_id for one in (await operator.describe()).attempts)


async def test_those_that_wait_share_a_call_and_each_gets_its_own_answer(
    line: Line, operator: SchedulerClient
) -> None:
    calls = PlaceCalls(line, line.pick(), lambda _: None)
    names = [f"r{number}" for number in range(MOST + 9)]
    found = await asyncio.gather(*(calls.ask(asked(name)) for name in names))
    assert [reply.placement.request_id for reply in found] == names
    assert line.sizes[0] == 1  # nothing to wait for
    assert sum(line.sizes) == len(names)
    assert max(line.sizes) <= MOST
    assert len(line.sizes) < len(names) / 8
    await calls.close()


async def test_a_malformed_one_spoils_no_other(line: Line, operator: SchedulerClient) -> None:
    calls = PlaceCalls(line, line.pick(), lambda _: None)
    malformed = asked("bad")
    malformed.prompt_tokens = 0
    found = await asyncio.gather(*(calls.ask(one) for one in (asked("first"), malformed, asked("good"))))
    assert [reply.WhichOneof("outcome") for reply in found] == ["placement", "refusal", "placement"]
    assert found[1].refusal == "request 'bad' has no prompt tokens"
    assert await booked(operator) == ["first", "good"]
    await calls.close()


async def test_a_call_without_an_answer_holds_nobody_up(line: Line) -> None:
    calls = PlaceCalls(line, line.pick(), lambda _: None)
    line.held.clear()
    stuck = asyncio.create_task(calls.ask(asked("stuck")))

    async def called() -> bool:
        return line.sizes == [1]

    await until(called)
    line.held = asyncio.Event()
    line.held.set()
    reply = await calls.ask(asked("next"))
    assert reply.placement.request_id == "next"
    assert not stuck.done()
    await calls.close()
    with pytest.raises(SchedulerUnavailable, match="given up"):
        await stuck


async def test_a_placement_whose_caller_left_is_given_back(operator: SchedulerClient) -> None:
    async with SchedulerClient(operator.address, router_id="router") as router:
        given_back: list[str] = []
        router._place_calls[operator.address]._on_unwanted = lambda placed: (
            given_back.append(placed.request_id),
            router._give_back(placed),
        )
        leaves = asyncio.create_task(place(router, "leaves", 1, 1, 1))
        await asyncio.sleep(0)  # it has asked
        await asyncio.sleep(0)  # its call has begun
        leaves.cancel()

        async def free_again() -> bool:
            return given_back == ["leaves"] and not await booked(operator)

        await until(free_again)


async def test_a_caller_that_leaves_as_the_answer_comes_gives_it_back(line: Line) -> None:
    given_back: list[str] = []
    calls = PlaceCalls(line, line.pick(), lambda placed: given_back.append(placed.request_id))
    leaves = asyncio.create_task(calls.ask(asked("leaves")))
    line.answered = lambda: asyncio.get_running_loop().call_soon(leaves.cancel)
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert given_back == ["leaves"]
    await calls.close()


async def test_who_left_before_the_call_is_not_placed(
    line: Line, operator: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_calls, "BEHIND_S", 60.0)
    calls = PlaceCalls(line, line.pick(), lambda _: None)
    line.held.clear()
    first, left, stays = (asyncio.create_task(calls.ask(asked(name))) for name in ("first", "left", "stays"))

    async def called() -> bool:
        return line.sizes == [1]

    await until(called)
    left.cancel()
    line.held.set()
    await asyncio.gather(first, stays)
    assert line.sizes == [1, 1]
    assert await booked(operator) == ["first", "stays"]
    await calls.close()


async def test_all_of_a_call_hear_that_nobody_answers() -> None:
    async with SchedulerClient(f"127.0.0.1:{free_port()}") as router:
        found = await asyncio.gather(
            *(place(router, f"r{number}", 1, 1, 1) for number in range(5)),
            return_exceptions=True,
        )
        assert [type(one) for one in found] == [SchedulerUnavailable] * 5
