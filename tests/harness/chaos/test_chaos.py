"""The chaos harness itself: its checks can fail, and its plans are reproducible."""

import asyncio
import contextlib
import itertools
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web

from baton.handoff import digests
from baton.handoff.memory import segments
from baton.handoff.memory.arena import Arena
from baton.handoff.save.staging import Staging
from baton.protos import scheduler_pb2 as pb
from harness.chaos import plans, questions
from harness.chaos.corruption import corrupt
from harness.chaos.faults import FAULTS
from harness.chaos.load import Answer, Fate, Load, judge
from harness.chaos.outcome import TURN_S, Outcome, covered_s, leaks
from harness.chaos.plans import PLANS
from harness.chaos.proxy import Proxy
from harness.chaos.questions import Case, Questions
from harness.chaos.site import Site
from harness.chaos.victims import Part, Shape
from harness.fake_worker import until
from harness.serving import serving
from harness.support import PATIENCE, free_port

RIGHT = list(range(100, 116))
ROUTER = SimpleNamespace(name="router-0", hung_times=())
HUNG = SimpleNamespace(name="router-0", hung_times=((13.0, 21.5),))


def answer(tokens, **changes):
    """Return a right stream of 16 tokens, one event per token every 0.1 s, with changes."""
    one = Answer("chaos-0-0.", Case((1, 2), 16, stream=True), ROUTER, sent=10.0)
    one.tokens, one.finish = tokens, "length"
    one.arrivals = [10.5 + 0.1 * at for at in range(len(tokens))]
    one.ended = one.arrivals[-1] if tokens else 10.5
    for name, value in changes.items():
        setattr(one, name, value)
    return one


def outcome():
    return Outcome("p", 1, "2P2D", "mtp", "memory", pause_limit_s=5.0)


def judged(one, *uncovered):
    told = outcome()
    told.add([one], [RIGHT], uncovered)
    return told


@pytest.mark.parametrize(
    ("tokens", "changes", "fate"),
    [
        (RIGHT, {}, Fate.RIGHT),
        ([*RIGHT[:7], 5, *RIGHT[8:]], {}, Fate.WRONG),
        ([*RIGHT[:15], 5], {}, Fate.WRONG),
        ([*RIGHT[:8], *RIGHT[7:]], {}, Fate.WRONG),  # a token twice
        ([*RIGHT[:8], *RIGHT[9:], 7], {}, Fate.WRONG),  # a token lost
        ([*RIGHT, 5], {}, Fate.WRONG),
        ([5], {"error": "closed", "router_lost": True}, Fate.WRONG),
        (RIGHT[:3], {"error": "closed", "router_lost": True}, Fate.ROUTER_LOST),
        (RIGHT[:9], {}, Fate.FAILED),  # the stream closed early, without an error
        ([], {"finish": ""}, Fate.FAILED),
        (RIGHT, {"finish": "stop"}, Fate.FAILED),
        (RIGHT, {"error": "no [DONE]"}, Fate.FAILED),
    ],
)
def test_an_answer_is_judged(tokens, changes, fate):
    one = answer(tokens, **changes)
    told = judged(one)
    assert judge(one, RIGHT)[0] is fate
    assert (told.wrong, told.failed, told.router_lost) == tuple(
        int(fate is each) for each in (Fate.WRONG, Fate.FAILED, Fate.ROUTER_LOST)
    )
    assert told.good is (fate in (Fate.RIGHT, Fate.ROUTER_LOST))
    assert bool(told.messages) is not told.good


def test_a_503_is_a_failure_unless_nobody_could_serve():
    refused = answer(RIGHT, refused=[3.0])
    assert judged(refused, (2.0, 4.0)).good
    told = judged(refused, (3.5, 4.0))
    assert (told.good, told.refused, told.refused_needlessly) == (False, 0, 1)


def test_pauses_count_from_the_request_to_the_end_without_the_time_of_a_restart():
    late = answer(RIGHT, ended=22.0)  # the last token came at 12.0
    told = judged(late)
    assert told.longest_pause_s == told.longest_covered_pause_s == pytest.approx(10.0)
    assert told.over_limit == 1
    for told in (judged(late, (13.0, 21.5)), judged(answer(RIGHT, ended=22.0, router=HUNG))):
        assert told.longest_pause_s == pytest.approx(10.0)
        assert (told.longest_covered_pause_s, told.over_limit) == (pytest.approx(1.5), 0)
    assert judged(answer(RIGHT, sent=4.0)).longest_pause_s == pytest.approx(6.5)
    assert covered_s((1.0, 2.0), [(0.0, 9.0)]) == 0.0


BATCH = Case((1, 2), 16, stream=True, batch=True)


@pytest.mark.parametrize(
    ("changes", "struck", "over"),
    [
        # The last token arrives at 12.0. The limit is 5 s, plus a lease for each further fault in the pause.
        ({"ended": 19.0}, (11.0, 12.5, 19.5), 1),
        ({"ended": 19.0}, (12.5, 15.0), 0),
        # The first token arrives 6.5 s after the request. A pause is judged from its fault on.
        ({"sent": 4.0}, (), 1),
        ({"sent": 4.0}, (6.0,), 0),  # 2 s, and 4.5 s
        ({"sent": 4.0}, (5.0,), 1),  # 5.5 s from the fault on
        ({"sent": 4.0}, (9.9,), 1),  # 5.9 s before it
        ({"sent": 4.0}, (5.0, 6.0), 0),
        # Batch work that lost its worker may wait for its turn again, up to a limit.
        ({"case": BATCH, "ended": 19.0}, (), 1),
        ({"case": BATCH, "ended": 19.0}, (12.1,), 0),
        ({"case": BATCH, "ended": 19.0}, (11.6,), 0),  # the last token was on its way
        ({"case": BATCH, "ended": 19.0}, (11.4,), 1),
        ({"case": BATCH, "ended": 12.1 + TURN_S + 4.9}, (12.1,), 0),
        ({"case": BATCH, "ended": 12.1 + TURN_S + 5.1}, (12.1,), 1),
    ],
)
def test_pauses_are_judged(changes, struck, over):
    told = outcome()
    told.add([answer(RIGHT, **changes)], [RIGHT], [], struck)
    assert told.over_limit == over


def idle(free=99, **load):
    identity = pb.WorkerIdentity(worker_id="d", capacity=pb.Capacity(num_blocks=100))
    worker = pb.WorkerStatus(identity=identity, load=pb.WorkerLoad(free_blocks=free, **load))
    return pb.Description(workers=[worker])


def test_every_leak_and_crash_is_noticed():
    assert not leaks(idle()).any
    assert leaks(idle(free=97)).blocks == 2
    assert leaks(idle(pinned_handoffs=1, pinned_bytes=5)).leases == 1
    assert leaks(idle(running=1, waiting=2)).running == 3
    held = idle()
    held.workers[0].reserved_requests = 4
    held.attempts.add()
    assert (leaks(held).reservations, leaks(held).attempts) == (4, 1)
    for name in ("blocks", "attempts", "pinned", "segments", "running"):
        one = outcome()
        setattr(one.leaks, name, 1)
        assert not one.good
    for name in ("crashes", "unhealed"):
        one = outcome()
        getattr(one, name).append("x")
        assert not one.good


def test_figures_are_judged_by_the_plans_bounds():
    for least, most, text in (
        ({"refused": 2, "most_booked": 12}, {"recomputed": 1, "lost": 0}, ""),
        ({"refused": 3}, {}, "refused is 2 and should be at least 3"),
        ({"handoff": 1}, {}, "handoff is 0 and should be at least 1"),
        ({}, {"recomputed": 0}, "recomputed is 1 and should be at most 0"),
    ):
        one = outcome()
        one.retries, one.recomputed, one.most_booked = {"refused": 2}, 1, 12
        one.meet(least, most)
        assert (one.good, one.unmet) == (not text, [text] if text else [])
        assert text in str(one)


class _Server:
    """A router with given answers; `calls` counts the requests."""

    def __init__(self):
        self.events = []
        self.refuse = 0  # first requests that get 503
        self.calls = 0

    async def answer(self, request):
        self.calls += 1
        if self.calls <= self.refuse:
            return web.Response(status=503, headers={"Retry-After": "0"})
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(ids, reason=None):
    return {"choices": [{"token_ids": ids, "finish_reason": reason}]}


@pytest.mark.parametrize(
    ("events", "fate"),
    [
        ([_event(RIGHT[:1]), _event(RIGHT[1:15]), _event(RIGHT[15:], "length")], Fate.RIGHT),
        ([_event(RIGHT[:4]), _event([7], "length")], Fate.WRONG),
        ([_event(RIGHT[:4])], Fate.FAILED),
        ([_event(RIGHT[:4]), {"error": {"message": "gone"}}], Fate.FAILED),
        ([], Fate.FAILED),
    ],
)
async def test_the_load_reads_streams_and_judges_them(events, fate, monkeypatch):
    server = _Server()
    server.events, server.refuse = events, 2
    site = Site(Shape(), Path("/nowhere"))
    known = Questions({(1, 2): list(range(100, 400))})
    monkeypatch.setattr(known, "draw", lambda _, **__: Case((1, 2), 16, stream=True))
    nowhere = contextlib.nullcontext(f"127.0.0.1:{free_port()}")
    async with serving(server.answer) if events else nowhere as place:
        port = int(place.partition(":")[2])
        site.parts.append(Part("router-0", "router", {"router": {"port": port}}, site))
        async with Load(site, known, 1, "s") as load:
            await until(lambda: load.over, "an answer is over", 10.0)
    one = load.over[0]
    assert judge(one, load.expected(one))[0] is fate
    if events:
        assert len(one.refused) == 2
        assert all(end >= start for start, end in one.pauses())


@pytest.mark.parametrize("one", PLANS.values(), ids=list(PLANS))
def test_a_seed_makes_the_same_plan_with_each_fault_at_each_of_its_stages(one):
    first, again, other = (list(itertools.islice(one.events(seed), 40)) for seed in (7, 7, 8))
    assert first == again
    assert (first != other) == bool(one.faults)
    wanted = [(kind, stage) for kind in one.faults for stage in one.stages.get(kind, FAULTS[kind].stages)]
    events = list(itertools.islice(one.events(3), 2 * len(wanted)))
    for begin in range(0, len(events), max(1, len(wanted))):
        round_ = events[begin : begin + len(wanted)]
        assert sorted((event.fault, event.stage) for event in round_) == sorted(wanted)
    for event in events:
        low, high = one.hold_s.get(event.fault, FAULTS[event.fault].hold_s)
        assert low <= event.hold_s <= high


def test_the_whole_set_takes_half_an_hour():
    assert 20 <= sum(PLANS[name].seconds for name in plans.ALL) / 60 <= 36
    assert {PLANS[name].shape.name for name in plans.ALL} == {
        *("1P1D", "2P2D", "1E1P1D", "1P1D (gangs of 2)", "no engines")
    }
    assert {kind for name in plans.ALL for kind in PLANS[name].faults} == set(FAULTS)


def test_questions_with_images_are_chats():
    prompts = questions.sample(9, tiny=True, images=True)
    cases = [Case(prompt, 9, stream=True) for prompt in prompts]
    assert sum(bool(one.images) for one in cases) == questions.IMAGES
    shown = next(one for one in cases if len(one.images) == 2)
    assert (shown.path, shown.images) == ("/v1/chat/completions", (2, 102))
    parts = shown.body()["messages"][0]["content"]
    assert [one["type"] for one in parts] == ["image_url", "image_url", "text"]
    assert "prompt" in cases[0].body()


def test_corruption_hits_each_whole_save_once_and_nothing_else():
    size = 1024
    staging = Staging(Arena(1 << 20, size), lease_s=60.0)
    rows = np.random.default_rng(1).integers(0, 256, (3, 1024), np.uint8)
    try:
        entries = [staging.reserve(name, 1, len(rows)) for name in ("whole", "begun")]
        for entry in entries:
            fill = staging.filling(entry)
            fill.view.records(0, len(rows))[:] = rows
            if entry is entries[0]:
                fill.add(np.concatenate([digests.of_records(row[None], 0, 0) for row in rows]))
                fill.close()
            staging.publish(entry)
        memory = segments.attach(entry.place.segment).data
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


async def test_the_proxy_passes_drops_and_delays():
    async def echo(reader, writer):
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    loop = asyncio.get_running_loop()
    proxy = Proxy()
    await proxy.start()
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        proxy.target = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)

        async def said(text):
            began = loop.time()
            writer.write(text)
            async with asyncio.timeout(5 * PATIENCE):
                assert await reader.readline() == text
            return loop.time() - began

        assert await said(b"one\n") < PATIENCE
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
