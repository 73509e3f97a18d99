"""The harness itself: a checker that cannot fail, or a plan that cannot be repeated, proves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from aiohttp import web

from baton.handoff import digests, segments
from baton.handoff.arena import Arena
from baton.handoff.staging import Staging
from baton.protos import scheduler_pb2 as pb
from tests.chaos import answers, page, plans
from tests.chaos.answers import Case, Questions
from tests.chaos.corruption import corrupt
from tests.chaos.faults import FAULTS, fault
from tests.chaos.load import Answer, Fate, Load, judge
from tests.chaos.outcome import Leaks, Outcome, covered_s, leaks
from tests.chaos.plans import PLANS, Plan, plan
from tests.chaos.proxy import Proxy
from tests.chaos.site import Part, Shape, Site
from tests.support import PATIENCE, free_port

RIGHT = list(range(100, 116))


def answer(tokens: list[int], **changes: Any) -> Answer:
    """A stream of 16 tokens, an event a token each 0.1 s, right but for the changes."""
    one = Answer("chaos-0-0.", Case((1, 2), 16, stream=True), cast(Part, _Named()), asked=10.0)
    one.tokens, one.finish = tokens, "length"
    one.arrivals = [10.5 + 0.1 * at for at in range(len(tokens))]
    one.ended = one.arrivals[-1] if tokens else 10.5
    for name, value in changes.items():
        setattr(one, name, value)
    return one


def outcome() -> Outcome:
    return Outcome("p", 1, "2P2D", "mtp", "memory", pause_limit_s=5.0)


def judged(one: Answer, *uncovered: tuple[float, float]) -> Outcome:
    told = outcome()
    told.add([one], [RIGHT], uncovered)
    return told


# -- the checker


def test_a_right_answer_is_good() -> None:
    told = judged(answer(RIGHT))
    assert (told.good, told.requests, told.failed, told.wrong) == (True, 1, 0, 0)
    assert told.longest_pause_s == pytest.approx(0.5)


@pytest.mark.parametrize("at", [0, 7, 15])
def test_a_wrong_token_is_noticed(at: int) -> None:
    told = judged(answer([*RIGHT[:at], 5, *RIGHT[at + 1 :]]))
    assert (told.good, told.wrong, told.failed) == (False, 1, 0)
    assert f"token {at} is 5, not {RIGHT[at]}" in told.messages[0]


@pytest.mark.parametrize(
    "tokens",
    [[*RIGHT[:8], *RIGHT[7:]], [*RIGHT[:8], *RIGHT[9:], 7], [*RIGHT, 5]],
    ids=["twice", "lost", "more"],
)
def test_a_token_twice_or_lost_or_too_many_is_wrong(tokens: list[int]) -> None:
    assert judged(answer(tokens)).wrong == 1


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        (RIGHT[:9], {}),  # the stream closed, as if that were all
        (RIGHT[:9], {"finish": ""}),
        ([], {"finish": ""}),
        (RIGHT, {"finish": "stop"}),
        (RIGHT[:9], {"error": "connection closed"}),
        (RIGHT, {"error": "no [DONE]"}),
    ],
)
def test_a_lost_answer_is_noticed(tokens: list[int], changes: dict[str, Any]) -> None:
    told = judged(answer(tokens, **changes))
    assert (told.good, told.failed, told.wrong) == (False, 1, 0)
    assert told.messages


def test_what_a_killed_router_had_counts_apart_but_not_its_wrong_tokens() -> None:
    lost = answer(RIGHT[:3], error="closed", router_lost=True, router=cast(Part, _Named()))
    assert (judged(lost).router_lost, judged(lost).good) == (1, True)
    lost.tokens = [5]
    assert judge(lost, RIGHT)[0] is Fate.WRONG


class _Named:
    name = "router-0"
    hung_times: tuple[tuple[float, float], ...] = ()


class _Hung(_Named):
    hung_times = ((13.0, 21.5),)


def test_a_503_is_a_failure_unless_nobody_could_serve() -> None:
    refused = answer(RIGHT, refused=[3.0])
    assert judged(refused, (2.0, 4.0)).good
    told = judged(refused, (3.5, 4.0))
    assert (told.good, told.refused, told.refused_needlessly) == (False, 0, 1)


def test_pauses_count_from_the_request_to_the_end_without_the_time_of_a_restart() -> None:
    late = answer(RIGHT, ended=22.0, router=_Named())  # the last token came at 12.0
    told = judged(late)
    assert told.longest_pause_s == told.longest_covered_pause_s == pytest.approx(10.0)
    assert told.over_limit == 1
    told = judged(late, (13.0, 21.5))
    assert told.longest_pause_s == pytest.approx(10.0)
    assert (told.longest_covered_pause_s, told.over_limit) == (pytest.approx(1.5), 0)
    told = judged(answer(RIGHT, ended=22.0, router=_Hung()))  # the same where its router hung
    assert (told.longest_covered_pause_s, told.over_limit) == (pytest.approx(1.5), 0)
    assert judged(answer(RIGHT, asked=4.0)).longest_pause_s == pytest.approx(6.5)
    assert covered_s((1.0, 2.0), [(0.0, 9.0)]) == 0.0


def idle(free: int = 99, **load: int) -> pb.Description:
    identity = pb.WorkerIdentity(worker_id="d", capacity=pb.Capacity(num_blocks=100))
    worker = pb.WorkerStatus(identity=identity, load=pb.WorkerLoad(free_blocks=free, **load))
    return pb.Description(workers=[worker])


def test_every_leak_is_noticed() -> None:
    assert not leaks(idle()).any
    assert leaks(idle(free=97)).blocks == 2
    assert leaks(idle(pinned_handoffs=1, pinned_bytes=5)).leases == 1
    assert leaks(idle(running=1, waiting=2)).running == 3
    reserved = idle()
    reserved.workers[0].reserved_requests = 4
    assert leaks(reserved).reservations == 4
    live = idle()
    live.attempts.add()
    assert leaks(live).attempts == 1
    for leaked in (Leaks(blocks=1), Leaks(attempts=1), Leaks(pinned=1), Leaks(segments=1), Leaks(running=1)):
        one = outcome()
        one.leaks = leaked
        assert not one.good


def test_crashes_and_what_was_not_mended_are_not_good() -> None:
    for name in ("crashes", "unhealed"):
        one = outcome()
        getattr(one, name).append("x")
        assert not one.good


# -- the load: real HTTP, a server that does what it should not


class _Server:
    """A router whose answers a test chooses; `calls` counts the requests."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.refuse = 0  # with 503, first
        self.calls = 0
        self.port = free_port()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        if self.calls <= self.refuse:
            return web.Response(status=503, headers={"Retry-After": "0"})
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@contextlib.asynccontextmanager
async def _serving(server: _Server) -> Any:
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", server.port).start()
    try:
        yield
    finally:
        await runner.cleanup()


def _event(ids: list[int], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids, "finish_reason": reason}]}


async def _first(server: _Server, monkeypatch: pytest.MonkeyPatch) -> tuple[Fate, str, Answer]:
    """What the load makes of the server's answer."""
    site = Site(Shape(), Path("/nowhere"))
    site.parts.append(Part("router-0", "router", {"router": {"port": server.port}}, site))
    known = Questions({(1, 2): list(range(100, 400))})
    monkeypatch.setattr(known, "draw", lambda _: Case((1, 2), 16, stream=True))
    async with _serving(server), Load(site, known, 1, "s") as load:
        async with asyncio.timeout(10 * PATIENCE):
            while not load.over:  # noqa: ASYNC110 (a poll with a deadline)
                await asyncio.sleep(0.005)
    one = load.over[0]
    return *judge(one, load.expected(one)), one


async def test_the_load_reads_streams_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    server = _Server()
    server.events = [_event(RIGHT[:1]), _event(RIGHT[1:15]), _event(RIGHT[15:], "length")]
    server.refuse = 2
    fate, how, one = await _first(server, monkeypatch)
    assert (fate, how, len(one.arrivals), len(one.refused)) == (Fate.RIGHT, "", 3, 2)
    assert all(end >= start for start, end in one.pauses())


@pytest.mark.parametrize(
    ("events", "fate"),
    [
        ([_event(RIGHT[:4]), _event([7], "length")], Fate.WRONG),
        ([_event(RIGHT[:4])], Fate.FAILED),
        ([_event(RIGHT[:4]), {"error": {"message": "gone"}}], Fate.FAILED),
    ],
)
async def test_the_load_notices_what_is_wrong(
    events: list[dict[str, Any]], fate: Fate, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _Server()
    server.events = events
    assert (await _first(server, monkeypatch))[0] is fate


async def test_without_a_server_a_request_fails() -> None:
    site = Site(Shape(), Path("/nowhere"))
    site.parts.append(Part("router-0", "router", {"router": {"port": free_port()}}, site))
    async with Load(site, Questions({(1, 2): RIGHT * 20}), 1, "s") as load:
        async with asyncio.timeout(10 * PATIENCE):
            while not load.over:  # noqa: ASYNC110 (a poll with a deadline)
                await asyncio.sleep(0.005)
    assert judge(load.over[0], load.expected(load.over[0]))[0] is Fate.FAILED


# -- plans


@pytest.mark.parametrize("name", list(PLANS))
def test_a_seed_makes_the_same_plan_again(name: str) -> None:
    one = PLANS[name]
    first, again, other = (list(itertools.islice(one.events(seed), 40)) for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize("name", list(PLANS))
def test_each_round_has_each_fault_at_each_of_its_stages(name: str) -> None:
    one = PLANS[name]
    wanted = [(kind, stage) for kind in one.faults for stage in one.stages.get(kind, FAULTS[kind].stages)]
    events = list(itertools.islice(one.events(3), 2 * len(wanted)))
    for turn in range(1 if one.once else 2):
        round_ = events[turn * len(wanted) : (turn + 1) * len(wanted)]
        assert sorted((event.fault, event.stage) for event in round_) == sorted(wanted)
    for event in events:
        low, high = one.hold_s.get(event.fault, FAULTS[event.fault].hold_s)
        assert low <= event.hold_s <= high


def test_the_whole_set_takes_twenty_to_twenty_five_minutes() -> None:
    assert 20 <= sum(PLANS[name].seconds for name in plans.ALL) / 60 <= 25
    assert {PLANS[name].shape.name for name in plans.ALL} == {"1P1D", "2P2D"}
    assert {kind for name in plans.ALL for kind in PLANS[name].faults} == set(FAULTS)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="kill-decode already"):
        fault()(FAULTS["kill-decode"].run)
    with pytest.raises(ValueError, match="no such fault: sing"):
        plan(Plan("x", Shape(), ("sing",), ""))


def test_questions_are_of_the_asked_lengths() -> None:
    lengths = [len(prompt) for prompt in answers.asked(2)]
    assert min(lengths) <= 32
    assert max(lengths) == answers.LONGEST
    assert len(lengths) > 20
    assert len(answers.asked(PLANS["short"].every)) >= 5


# -- what does the harm


def test_corruption_hits_each_whole_save_once_and_nothing_else() -> None:
    size = 1024
    staging = Staging(Arena(1 << 20, size), lease_s=60.0)
    rows = np.random.default_rng(1).integers(0, 256, (3, 1024), np.uint8)
    try:
        entries = [staging.reserve(name, 1, len(rows)) for name in ("whole", "begun")]
        for entry in entries:
            fill = staging.filling(entry)
            fill.view.records(0, len(rows))[:] = rows
            if entry is entries[0]:
                fill.add(digests.of_records(rows, 0, 0))
                fill.close()
            staging.publish(entry)
        memory = segments.attach(entry.place.segment)
        before, seen = memory.copy(), set[int]()
        hits = [corrupt(os.getpid(), random.Random(1), seen, size) for _ in range(2)]
        assert hits == [1, 0]
        assert len(seen) == 1
        (at,) = np.flatnonzero(before != memory)
        ((first, _),) = entries[0].place.runs
        assert 0 <= at - entries[0].place.offset - first * size < rows.size
        assert bin(int(before[at]) ^ int(memory[at])).count("1") == 1
        fill.close()
    finally:
        staging.close()


async def test_the_proxy_passes_drops_and_delays() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    loop = asyncio.get_running_loop()
    proxy = Proxy()
    await proxy.start()
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        proxy.target = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)

        async def said(text: bytes) -> float:
            began = loop.time()
            writer.write(text)
            async with asyncio.timeout(5 * PATIENCE):
                assert await reader.readline() == text
            return loop.time() - began

        assert await said(b"one\n") < 1.0
        proxy.delay_s = 0.1
        assert await said(b"two\n") >= 0.2
        proxy.drop()
        writer.write(b"three\n")
        coming = asyncio.create_task(reader.readline())
        assert not (await asyncio.wait([coming], timeout=0.1))[0]
        proxy.mend()
        async with asyncio.timeout(5 * PATIENCE):
            assert await coming == b"three\n"
        writer.close()
        await proxy.close()


# -- the page


def test_a_run_becomes_a_table(tmp_path: Path) -> None:
    told = judged(answer(RIGHT))
    told.faults, told.stages = {"kill-decode": 2}, {"decode stream": 3}
    page.save(tmp_path / "chaos.json", [told])
    written = tmp_path / "page.md"
    written.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    page.write(tmp_path / "chaos.json", written)
    text = written.read_text()
    assert "| p | 2P2D | mtp | memory | 1 | 1 | 0 | 0 | 0 | 0 | 0.50 | 0.50 | 5.0 | 0.50 | 0 |" in text
    assert "| kill-decode | 2 |" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    written.write_text("nothing")
    with pytest.raises(ValueError, match="has no"):
        page.write(tmp_path / "chaos.json", written)
