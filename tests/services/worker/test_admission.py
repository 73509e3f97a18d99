"""A worker takes no more than its bounds, whatever was booked, and never refuses what was booked rightly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, PHASE_SAVE, Failed, Phase, Start
from baton.scheduler.types import Booking, Reserved
from baton.services.config import SchedulerSettings
from baton.services.engine.errors import RequestRefused
from baton.services.engine.host import EngineStep
from baton.services.roles import DECODE, MIXED
from baton.services.worker.admission import Admission, Share
from baton.services.worker.dispatcher import Dispatcher
from baton.services.worker.metrics import WorkerMetrics
from tests.services.worker.test_dispatcher import (
    GRAMMAR,
    INFO,
    Compilers,
    Host,
    complete,
    incoming,
    start,
    with_kv,
)

LIMITS = SchedulerSettings(max_queued_prompt_tokens=100, max_queue_factor=1.5)
CAPACITY = pb.Capacity(max_num_seqs=4, num_blocks=41)  # 6 requests, 40 blocks


@pytest.fixture
def admission() -> Admission:
    return ready()


def ready() -> Admission:
    made = Admission(LIMITS)
    made.fit(CAPACITY)
    return made


def asked(phase: Phase, prompt_tokens: int = 0, blocks: int = 0, alone: int = 0) -> Start:
    return Start(phase=phase, prompt_tokens=prompt_tokens, blocks=blocks, alone_tokens=alone)


def held(admission: Admission) -> tuple[int, int, int, int]:
    return admission.prompt_tokens, admission.requests, admission.blocks, admission.extras


def why_not(admission: Admission, start: Start) -> str:
    before = held(admission)
    with pytest.raises(RequestRefused) as caught:
        admission.take(start)
    assert caught.value.code == Failed.CODE_FULL
    assert held(admission) == before
    return str(caught.value)


# -- the bounds


def test_prompts_queue_up_to_their_tokens_and_an_idle_worker_takes_any(admission: Admission) -> None:
    long = admission.take(asked(PHASE_PREFILL, 500))
    assert why_not(admission, asked(PHASE_PREFILL, 1)) == (
        "this worker is full: 500 of 100 prompt tokens, 1 more are needed: scheduler.max_queued_prompt_tokens"
    )
    admission.prefilled(long)
    for _ in range(2):
        admission.take(asked(PHASE_PREFILL, 50))
    why_not(admission, asked(PHASE_DECODE, 1, 1))
    admission.take(asked(PHASE_DECODE, 0, 1))  # handed over: it computes none


def test_prompts_alone_are_not_bounded_in_number_but_each_counts(admission: Admission) -> None:
    for _ in range(100):
        admission.take(asked(PHASE_PREFILL))
    assert "prompt tokens" in why_not(admission, asked(PHASE_PREFILL))


def test_requests_to_be_decoded_are_bounded_in_number(admission: Admission) -> None:
    admission.take(asked(PHASE_PREFILL, 10))
    for _ in range(5):
        admission.take(asked(PHASE_DECODE, 0, 1))
    assert why_not(admission, asked(PHASE_DECODE, 0, 1)) == (
        "this worker is full: 6 of 6 requests: engine.max_num_seqs, scheduler.max_queue_factor"
    )


def test_blocks_are_bounded_and_an_idle_worker_takes_all_that_it_has(admission: Admission) -> None:
    share = admission.take(asked(PHASE_DECODE, 0, 500))
    assert share.blocks == 40
    assert why_not(admission, asked(PHASE_DECODE, 0, 1)) == (
        "this worker is full: 40 of 40 KV blocks, 1 more are needed: engine.kv_cache_gib"
    )
    admission.shared(share, 3)
    admission.take(asked(PHASE_DECODE, 0, 3))
    why_not(admission, asked(PHASE_DECODE, 0, 1))


def test_what_nobody_books_is_bounded_by_itself(admission: Admission) -> None:
    taken = [admission.take(asked(PHASE_SAVE)), admission.take(asked(PHASE_DECODE, alone=4))]
    taken += [admission.take(asked(PHASE_SAVE)) for _ in range(2)]
    assert why_not(admission, asked(PHASE_SAVE)) == (
        "this worker is full: 4 of 4 saves and trials: engine.max_num_seqs"
    )
    for _ in range(6):
        admission.take(asked(PHASE_DECODE, 0, 1))
    admission.give_back(taken[0])
    admission.take(asked(PHASE_SAVE))


def test_nothing_is_given_back_twice(admission: Admission) -> None:
    stays, ends = admission.take(asked(PHASE_DECODE, 40, 10)), admission.take(asked(PHASE_DECODE, 20, 7))
    admission.shared(ends, 9)
    for _ in range(2):
        admission.prefilled(ends)
        admission.give_back(ends)
        admission.shared(ends, 1)
    assert held(admission) == (40, 1, 10, 0)
    admission.give_back(stays)
    assert held(admission) == (0, 0, 0, 0)


# -- over random sequences

KINDS = (
    (PHASE_PREFILL, 120, 0, 0),
    (PHASE_DECODE, 120, 50, 0),
    (PHASE_DECODE, 0, 9, 0),
    (PHASE_DECODE, 0, 0, 4),
    (PHASE_SAVE, 0, 0, 0),
)  # phase, most prompt tokens, most blocks, tokens alone


@pytest.mark.parametrize("seed", range(8))
def test_the_figures_are_sums_and_never_beyond_a_bound(seed: int) -> None:
    draw = random.Random(seed)
    admission, shares, refused = ready(), list[Share](), 0
    for _ in range(2_000):
        match draw.randrange(5):
            case 0 | 1:
                phase, tokens, blocks, alone = draw.choice(KINDS)
                message = asked(phase, draw.randint(0, tokens), draw.randint(0, blocks), alone)
                before = held(admission)
                try:
                    shares.append(admission.take(message))
                except RequestRefused:
                    refused += 1
                    assert held(admission) == before
                else:
                    assert before[0] == 0 or admission.prompt_tokens <= max(100, before[0])
            case 2 if shares:
                admission.prefilled(draw.choice(shares))
            case 3 if shares:
                admission.shared(draw.choice(shares), draw.randrange(20))
            case 4 if shares:
                admission.give_back(shares.pop(draw.randrange(len(shares))))
        parts = [(0, 0, 0, 0), *((one.prompt_tokens, one.requests, one.blocks, one.extras) for one in shares)]
        assert held(admission) == tuple(map(sum, zip(*parts, strict=True)))
        assert min(held(admission)) >= 0
        assert admission.blocks <= 40
        assert admission.extras <= 4
    assert refused > 20
    for share in shares:
        admission.give_back(share)
    assert held(admission) == (0, 0, 0, 0)


# -- beside a scheduler's count


class Deployment:
    """A scheduler's count and the admission of each worker, as messages of many requests are under way.

    A router books, and only then starts; it hears of each end from the worker, and only then reports it.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.counted = {name: Reserved() for name in ("p", "d", "m")}
        self.workers = {name: ready() for name in self.counted}
        self.under_way: list[Iterator[None]] = []
        self.refused = self.booked = 0

    def step(self) -> None:
        if self.draw.random() < 0.3 and (booking := self._booking()) is not None:
            for name in booking.worker_ids:
                self.counted[name].add(booking.share(name))
            self.booked += 1
            self.under_way.append(self._life(booking))
        elif self.under_way:
            life = self.draw.choice(self.under_way)
            if next(life, "over") == "over":
                self.under_way.remove(life)

    def _booking(self) -> Booking | None:
        """Return a booking for which one scheduler finds room."""
        prefill, decode = self.draw.choice([("p", "d"), ("p", "m"), ("m", "d"), ("", "d"), ("", "m")])
        tokens, blocks = self.draw.randrange(1, 120), self.draw.randrange(1, 30)
        booking = Booking(Attempt(f"r{self.booked}", 1), "r", prefill, decode, tokens, blocks)
        queued = self.counted[booking.prompt_worker_id].prompt_tokens
        there = self.counted[decode]
        full = queued and queued + tokens > 100
        return None if full or there.requests >= 6 or there.blocks + blocks > 40 else booking

    def _life(self, booking: Booking) -> Iterator[None]:
        yield
        prefill, decode, own = booking.prefill_id, booking.decode_id, booking.prompt_tokens
        if prefill:
            yield from self._run(prefill, asked(PHASE_PREFILL, own))
            self.counted[prefill].take(booking.share(prefill))
            yield
            own = 0
        yield from self._run(decode, asked(PHASE_DECODE, own, booking.blocks), shares=True)
        self.counted[decode].take(booking.share(decode))

    def _run(self, name: str, message: Start, *, shares: bool = False) -> Iterator[None]:
        admission = self.workers[name]
        try:
            share = admission.take(message)
        except RequestRefused:
            self.refused += 1
            return
        yield
        if self.draw.random() < 0.9:
            admission.prefilled(share)
            if shares:
                admission.shared(share, self.draw.randrange(9))
            yield
        admission.give_back(share)
        yield


@pytest.mark.parametrize("seed", range(8))
def test_what_one_scheduler_books_rightly_is_never_refused(seed: int) -> None:
    deployment = Deployment(seed)
    for _ in range(3_000):
        deployment.step()
        for name, admission in deployment.workers.items():
            counted = deployment.counted[name]
            assert admission.prompt_tokens <= counted.prompt_tokens
            assert admission.requests <= counted.requests
            assert admission.blocks <= counted.blocks
    assert deployment.booked > 200
    assert deployment.refused == 0


# -- in a worker


class Worker:
    """A dispatcher without an engine."""

    def __init__(self, role: Any = MIXED) -> None:
        self.host = Host()
        self.metrics = WorkerMetrics()
        self.dispatcher = Dispatcher(
            role, LIMITS, cast(Any, self.host), self.metrics, None, grammars=cast(Any, Compilers())
        )
        self.dispatcher.open(replace(INFO, max_num_seqs=4, num_blocks=41))
        self.session = self.dispatcher.connect("router")

    def start(self, message: Start, session: Any = None) -> None:
        self.dispatcher.start(session or self.session, message)

    def step(self, *names: str, session: Any = None, reason: FinishReason | None = None, **step: Any) -> None:
        outputs = [
            EngineCoreOutput(request_id=name, new_token_ids=[7], finish_reason=reason) for name in names
        ]
        found = {(session or self.session).number: EngineCoreOutputs(outputs=outputs, timestamp=1.0)}
        self.dispatcher.on_step(EngineStep(outputs=found, executed=True, **step))

    @property
    def held(self) -> tuple[int, int, int, int]:
        return held(self.dispatcher._admission)

    @property
    def failed(self) -> list[Failed]:
        return failed(self.session)


def failed(session: Any) -> list[Failed]:
    found: list[Failed] = []
    while not session._queue.empty():
        found += session._queue.get_nowait().failed
    return found


@pytest.fixture
async def worker() -> Worker:
    return Worker()


def booked(
    name: str, tokens: int = 0, blocks: int = 0, phase: Phase = PHASE_DECODE, epoch: int = 1, **params: Any
) -> Start:
    message = start(name, epoch, phase, **params)
    message.prompt_tokens, message.blocks = tokens, blocks
    return message


async def test_a_prompt_counts_until_its_first_output(worker: Worker) -> None:
    worker.start(booked("a", 60, 5))
    assert worker.held == (60, 1, 5, 0)
    worker.step("a#1")
    assert worker.held == (0, 1, 5, 0)
    worker.step("a#1")
    assert worker.held == (0, 1, 5, 0)


async def test_blocks_that_others_hold_too_are_given_back(worker: Worker) -> None:
    worker.start(booked("a", 0, 5))
    worker.step("a#1", shared={"a#1": 3, "unknown#1": 2})
    assert worker.held == (0, 1, 2, 0)


async def test_a_decode_counts_from_its_start_though_its_prompt_is_not_complete(worker: Worker) -> None:
    worker.start(with_kv(booked("a", 0, 30)))
    assert worker.held == (0, 1, 30, 0)
    worker.start(with_kv(booked("b", 0, 20)))
    [refusal] = worker.failed
    assert (refusal.request_id, refusal.code) == ("b", Failed.CODE_FULL)
    incoming(worker.dispatcher, "a#1").on_complete(complete(7))
    assert worker.held == (0, 1, 30, 0)
    await worker.dispatcher.close()


@pytest.mark.parametrize("phase", [PHASE_PREFILL, PHASE_DECODE])
async def test_a_later_epoch_takes_the_place_of_the_one_before(worker: Worker, phase: Phase) -> None:
    """It is not refused because of what it replaces."""
    worker.start(booked("a", 90, 35))
    later = booked("a", 80, 38, phase, epoch=2)
    worker.start(later)
    assert worker.failed == []
    assert worker.host.aborted == ["a#1"]
    assert worker.held == (later.prompt_tokens, 1, 38 if phase != PHASE_PREFILL else 0, 0)


async def test_a_late_epoch_is_stale_even_where_all_is_full(worker: Worker) -> None:
    worker.start(booked("a", 0, 40, epoch=2))
    worker.start(booked("a", 0, 40, epoch=1))
    assert [one.code for one in worker.failed] == [Failed.CODE_STALE]
    assert worker.held == (0, 1, 40, 0)


@pytest.mark.parametrize(
    "how", ["abort", "stream", "step", "drain", "engine", "refused", "invalid", "load", "end"]
)
async def test_all_is_given_back_however_it_ends(worker: Worker, how: str) -> None:
    loads = how == "load"
    message = booked("a", 0 if loads else 60, 5)
    worker.start(with_kv(message) if loads else message)
    if loads:
        incoming(worker.dispatcher, "a#1").on_complete(complete(7))
    worker.start(booked("g", 10, 5, **GRAMMAR))  # its grammar is compiled
    match how:
        case "abort":
            worker.dispatcher.abort(["a", "g"])
        case "stream":
            worker.dispatcher.disconnect(worker.session)
        case "step":
            worker.dispatcher.on_step(EngineStep(failed=["a#1", "g#1"], problem="shape mismatch"))
        case "drain":
            worker.dispatcher.abort_all()
        case "engine":
            worker.dispatcher.on_failure(RuntimeError("CUDA error"), {"a#1"})
        case "refused":
            worker.dispatcher.on_refused("a#1", ValueError("no"))
            worker.dispatcher.on_refused("g#1", ValueError("no"))
        case "invalid":
            worker.start(Start(request_id="a", epoch=2, phase=PHASE_DECODE, engine_request=b"\xc1"))
            worker.dispatcher.abort(["g"])
        case "load":
            worker.step("a#1", reason=FinishReason.ERROR)
            worker.dispatcher.abort(["g"])
        case "end":
            worker.step("a#1", reason=FinishReason.STOP)
            worker.dispatcher.abort(["g"])
    assert worker.dispatcher.requests == 0
    assert worker.held == (0, 0, 0, 0)


async def test_saves_and_trials_take_no_room_from_what_is_booked(worker: Worker) -> None:
    save = booked("s", 0, 0, PHASE_SAVE)
    save.prefix_tokens = 5
    worker.start(save)
    trial = booked("t")
    trial.alone_tokens = 4
    worker.start(trial)
    assert worker.held == (0, 0, 0, 2)
    for number in range(6):  # held until the trial is over
        worker.start(booked(f"r{number}", 0, 1))
    assert worker.failed == []
    worker.start(booked("one more", 0, 1))
    assert [one.code for one in worker.failed] == [Failed.CODE_FULL]


async def test_a_role_changes_no_bound(worker: Worker) -> None:
    """What was placed before still comes, and the engine is the same."""
    for number in range(6):
        worker.start(booked(f"r{number}", 0, 1))
    worker.dispatcher.become(DECODE)
    worker.start(booked("one more", 0, 1))
    assert [one.code for one in worker.failed] == [Failed.CODE_FULL]


@pytest.mark.parametrize("seed", range(3))
async def test_many_routers_that_promise_the_same_room_get_only_what_is_there(
    worker: Worker, seed: int
) -> None:
    """Thirty routers, none of which knows of the others: the bounds hold, and the rest hears so at once."""
    draw = random.Random(seed)
    sessions = [worker.dispatcher.connect(f"router {number}") for number in range(30)]
    live: dict[str, tuple[Any, int]] = {}
    refused = {"prompt tokens": 0, "requests": 0, "KV blocks": 0}
    for number in range(600):
        session, name = draw.choice(sessions), f"q{number}"
        prefills = draw.random() < 0.1
        tokens = draw.randrange(1, 80) if prefills or draw.random() < 0.4 else 0
        message = booked(
            name,
            tokens,
            0 if prefills else draw.randrange(1, 30),
            PHASE_PREFILL if prefills else PHASE_DECODE,
        )
        queued = worker.held[0]
        worker.start(message, session)
        answer = failed(session)
        prompt_tokens, requests, blocks, _ = worker.held
        if answer:
            [refusal] = answer
            assert (refusal.request_id, refusal.code) == (name, Failed.CODE_FULL)
            [key] = [key for key in refused if key in refusal.message]
            refused[key] += 1
        else:
            live[name] = session, tokens
        assert queued == 0 or prompt_tokens <= max(100, queued)
        assert blocks <= 40
        decoding = sum(one.phase == PHASE_DECODE for one in worker.dispatcher._attempts.all())
        assert decoding <= 6
        assert requests == len(live) == worker.dispatcher.requests
        if live and draw.random() < 0.8:
            name, (session, _) = draw.choice(list(live.items()))
            match draw.randrange(3):
                case 0:
                    worker.dispatcher.abort([name])
                    del live[name]
                case 1:
                    worker.step(f"{name}#1", session=session)
                    if worker.dispatcher._attempts.live(f"{name}#1") is None:
                        del live[name]
                    failed(session)
                case 2 if draw.random() < 0.1:
                    worker.dispatcher.disconnect(session)
                    sessions.remove(session)
                    sessions.append(worker.dispatcher.connect("another"))
                    live = {key: one for key, one in live.items() if one[0] is not session}
    assert min(refused.values()) > 20, refused
    name, labels = "baton_worker_requests_refused_total", {"why": "full"}
    assert worker.metrics.registry.get_sample_value(name, labels) == sum(refused.values())
    for session in list(sessions):
        worker.dispatcher.disconnect(session)
    assert worker.held == (0, 0, 0, 0)
