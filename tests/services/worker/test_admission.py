"""A worker accepts no more than its limits, and everything that one scheduler books."""

import random

import pytest
from vllm.v1.engine import FinishReason

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, PHASE_SAVE, Failed, Start
from baton.scheduler.types import Booking, Reserved
from baton.services.engine.errors import RequestRefused
from baton.services.engine.step import EngineStep
from baton.services.worker.admission import Admission
from harness.scheduling import usual
from tests.services.worker.idle_worker import GRAMMAR, Worker, complete, start, with_kv

LIMITS = usual(max_queued_prompt_tokens=100, max_queue_factor=1.5)
CAPACITY = pb.Capacity(max_num_seqs=4, num_blocks=41)  # 6 requests, 40 blocks


@pytest.fixture
def admission():
    return ready()


def ready():
    made = Admission(LIMITS)
    made.fit(CAPACITY)
    return made


def asked(phase, prompt_tokens=0, blocks=0, alone=0):
    return Start(phase=phase, prompt_tokens=prompt_tokens, blocks=blocks, alone_tokens=alone)


def held(admission):
    return admission.prompt_tokens, admission.requests, admission.blocks, admission.extras


def why_not(admission, start):
    before = held(admission)
    with pytest.raises(RequestRefused) as caught:
        admission.take(start)
    assert caught.value.code == Failed.CODE_FULL
    assert held(admission) == before
    return str(caught.value)


def test_queued_prompt_tokens_are_limited_but_an_idle_worker_accepts_any_prompt(admission):
    long = admission.take(asked(PHASE_PREFILL, 500))
    assert why_not(admission, asked(PHASE_PREFILL, 1)) == (
        "this worker is full: 500 of 100 prompt tokens, 1 more are needed: scheduler.max_queued_prompt_tokens"
    )
    admission.prefilled(long)
    for _ in range(2):
        admission.take(asked(PHASE_PREFILL, 50))
    why_not(admission, asked(PHASE_DECODE, 1, 1))
    admission.take(asked(PHASE_DECODE, 0, 1))  # handed over: it has no prompt to compute


def test_prompts_are_not_limited_in_number(admission):
    for _ in range(100):
        admission.take(asked(PHASE_PREFILL))
    assert "prompt tokens" in why_not(admission, asked(PHASE_PREFILL))


def test_decode_requests_are_limited_in_number(admission):
    admission.take(asked(PHASE_PREFILL, 10))
    for _ in range(5):
        admission.take(asked(PHASE_DECODE, 0, 1))
    assert why_not(admission, asked(PHASE_DECODE, 0, 1)) == (
        "this worker is full: 6 of 6 requests: engine.max_num_seqs"
    )


def test_blocks_are_limited_but_an_idle_worker_accepts_any_request(admission):
    share = admission.take(asked(PHASE_DECODE, 0, 500))
    assert share.blocks == 40
    assert why_not(admission, asked(PHASE_DECODE, 0, 1)) == (
        "this worker is full: 40 of 40 KV blocks, 1 more are needed: engine.kv_cache_gib"
    )
    admission.shared(share, 3)
    admission.take(asked(PHASE_DECODE, 0, 3))
    why_not(admission, asked(PHASE_DECODE, 0, 1))


def test_saves_and_trials_are_limited_separately(admission):
    taken = [admission.take(asked(PHASE_SAVE)), admission.take(asked(PHASE_DECODE, alone=4))]
    taken += [admission.take(asked(PHASE_SAVE)) for _ in range(2)]
    assert why_not(admission, asked(PHASE_SAVE)) == (
        "this worker is full: 4 of 4 saves and trials: engine.max_num_seqs"
    )
    for _ in range(6):
        admission.take(asked(PHASE_DECODE, 0, 1))
    admission.give_back(taken[0])
    admission.take(asked(PHASE_SAVE))


def test_nothing_is_given_back_twice(admission):
    stays, ends = admission.take(asked(PHASE_DECODE, 40, 10)), admission.take(asked(PHASE_DECODE, 20, 7))
    admission.shared(ends, 9)
    for _ in range(2):
        admission.prefilled(ends)
        admission.give_back(ends)
        admission.shared(ends, 1)
    assert held(admission) == (40, 1, 10, 0)
    admission.give_back(stays)
    assert held(admission) == (0, 0, 0, 0)


class Deployment:
    """A scheduler's bookings and each worker's admission, with the messages of many requests interleaved.

    A request is booked before its Start, and released after the worker has reported its end.
    """

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.counted = {name: Reserved() for name in ("p", "d", "m")}
        self.workers = {name: ready() for name in self.counted}
        self.under_way = []
        self.refused = self.booked = 0

    def step(self):
        if self.draw.random() < 0.3 and (booking := self._booking()) is not None:
            for name in booking.worker_ids:
                self.counted[name].add(booking.share(name))
            self.booked += 1
            self.under_way.append(self._life(booking))
        elif self.under_way:
            life = self.draw.choice(self.under_way)
            if next(life, "over") == "over":
                self.under_way.remove(life)

    def _booking(self):
        """Return a booking, if the scheduler has room for it."""
        prefill, decode = self.draw.choice([("p", "d"), ("p", "m"), ("m", "d"), ("", "d"), ("", "m")])
        tokens, blocks = self.draw.randrange(1, 120), self.draw.randrange(1, 30)
        booking = Booking(Attempt(f"r{self.booked}", 1), "r", prefill, decode, tokens, blocks)
        queued = self.counted[booking.prompt_worker_id].prompt_tokens
        there = self.counted[decode]
        full = queued and queued + tokens > 100
        return None if full or there.requests >= 6 or there.blocks + blocks > 40 else booking

    def _life(self, booking):
        yield
        prefill, decode, own = booking.prefill_id, booking.decode_id, booking.prompt_tokens
        if prefill:
            yield from self._run(prefill, asked(PHASE_PREFILL, own))
            self.counted[prefill].take(booking.share(prefill))
            yield
            own = 0
        yield from self._run(decode, asked(PHASE_DECODE, own, booking.blocks), shares=True)
        self.counted[decode].take(booking.share(decode))

    def _run(self, name, message, *, shares=False):
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
def test_bookings_of_one_scheduler_are_never_refused(seed):
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


@pytest.fixture
async def worker():
    return Worker(limits=LIMITS, max_num_seqs=4, num_blocks=41)


def of(worker):
    return held(worker.dispatcher._admission)


def booked(name, tokens=0, blocks=0, phase=PHASE_DECODE, epoch=1, **params):
    message = start(name, epoch, phase, **params)
    message.prompt_tokens, message.blocks = tokens, blocks
    return message


async def test_a_prompt_counts_until_its_first_output(worker):
    worker.start(booked("a", 60, 5))
    assert of(worker) == (60, 1, 5, 0)
    worker.step("a")
    assert of(worker) == (0, 1, 5, 0)
    worker.step("a")
    assert of(worker) == (0, 1, 5, 0)


async def test_blocks_shared_with_other_requests_are_given_back(worker):
    worker.start(booked("a", 0, 5))
    worker.step("a", shared={"a#1": 3, "unknown#1": 2})
    assert of(worker) == (0, 1, 2, 0)


async def test_a_decode_counts_from_its_start(worker):
    worker.start(with_kv(booked("a", 0, 30)))
    assert of(worker) == (0, 1, 30, 0)
    worker.start(with_kv(booked("b", 0, 20)))
    assert worker.codes() == {"b": Failed.CODE_FULL}
    worker.incoming("a").on_complete(complete(7))
    assert of(worker) == (0, 1, 30, 0)
    await worker.dispatcher.close()


@pytest.mark.parametrize("phase", [PHASE_PREFILL, PHASE_DECODE])
async def test_a_later_epoch_uses_the_room_of_the_earlier_one(worker, phase):
    worker.start(booked("a", 90, 35))
    later = booked("a", 80, 38, phase, epoch=2)
    worker.start(later)
    assert worker.failed() == []
    assert worker.engine.aborted == ["a#1"]
    assert of(worker) == (later.prompt_tokens, 1, 38 if phase != PHASE_PREFILL else 0, 0)


INVALID = Start(request_id="a", epoch=2, phase=PHASE_DECODE, engine_request=b"\xc1")
ENDS = {
    "abort": lambda worker: worker.dispatcher.abort(["a", "g"]),
    "stream": lambda worker: worker.dispatcher.disconnect(worker.session),
    "step": lambda worker: worker.dispatcher.on_step(EngineStep(failed=["a#1", "g#1"], problem="broken")),
    "drain": lambda worker: worker.dispatcher.abort_all(),
    "engine": lambda worker: worker.dispatcher.on_failure(RuntimeError("CUDA error"), {"a#1"}),
    "refused": lambda worker: [worker.dispatcher.on_refused(f"{one}#1", ValueError("no")) for one in "ag"],
}
ENDS_OF_A = {
    "invalid": lambda worker: worker.start(INVALID),
    "load": lambda worker: worker.step("a", reason=FinishReason.ERROR),
    "end": lambda worker: worker.step("a", reason=FinishReason.STOP),
}


@pytest.mark.parametrize("how", [*ENDS, *ENDS_OF_A])
async def test_all_room_is_given_back_however_a_request_ends(worker, how):
    loads = how == "load"
    message = booked("a", 0 if loads else 60, 5)
    worker.start(with_kv(message) if loads else message)
    if loads:
        worker.incoming("a").on_complete(complete(7))
    worker.start(booked("g", 10, 5, **GRAMMAR))  # its grammar is compiled
    (ENDS | ENDS_OF_A)[how](worker)
    if how in ENDS_OF_A:
        worker.dispatcher.abort(["g"])
    assert worker.dispatcher.requests == 0
    assert of(worker) == (0, 0, 0, 0)


async def test_saves_and_trials_take_no_room_from_bookings(worker):
    save = booked("s", 0, 0, PHASE_SAVE)
    save.prefix_tokens = 5
    worker.start(save)
    trial = booked("t")
    trial.alone_tokens = 4
    worker.start(trial)
    assert of(worker) == (0, 0, 0, 2)
    for number in range(6):  # held until the trial is over
        worker.start(booked(f"r{number}", 0, 1))
    assert worker.failed() == []
    worker.start(booked("one more", 0, 1))
    assert worker.codes() == {"one more": Failed.CODE_FULL}
