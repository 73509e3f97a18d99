"""A discrete-event simulation of a deployment, which the controller under test scales.

Simulated: Poisson arrivals with log-normal prompt and answer lengths; placement on the less loaded of two
random workers; prefill in order of arrival; decoding, where the gap between tokens grows with the batch;
requests that wait for room; workers that load, drain, and change roles while they finish earlier work. Not
simulated: the time of handoffs, prefix caches, full KV caches, failures.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from baton.autoscale.capacity import Gap
from baton.autoscale.controller import Controller
from baton.autoscale.histogram import SECONDS, TOKENS, Histogram
from baton.autoscale.seen import Member, Seen
from baton.protos import scheduler_pb2 as pb

P, D = pb.ROLE_PREFILL, pb.ROLE_DECODE
SPREAD = 0.6  # standard deviation of the logarithm of lengths
QUEUE_FACTOR = 1.25  # scheduler.max_queue_factor
CHUNK = 256  # prompt tokens in a step that also decodes
SAMPLE_S = 10.0


@dataclass(frozen=True)
class Phase:
    """A period of steady load."""

    name: str
    seconds: float
    per_s: float
    prompt: float  # mean tokens
    answer: float


@dataclass(frozen=True)
class Service:
    """The speed of one worker."""

    prefill_tokens_per_s: float
    gap: Gap
    slots: int


@dataclass(slots=True)
class Request:
    arrives: float
    prompt: int
    answer: int
    first: float = 0.0
    ended: float = 0.0

    def within(self, first_token_s: float, gap_s: float) -> bool:
        early = bool(self.first) and self.first - self.arrives <= first_token_s
        return early and bool(self.ended) and self.ended - self.first <= gap_s * max(1, self.answer - 1)


@dataclass(slots=True, eq=False)
class Worker:
    """A worker. It may have work of both roles after a change."""

    name: str
    role: pb.Role
    service: Service
    ready: bool
    leaving: bool = False
    # Requests to prefill, with their decode workers; the first one is running.
    queue: deque[tuple[Request, Worker]] = field(default_factory=deque)
    batch: list[tuple[float, int, Request]] = field(default_factory=list)  # heap, by the last token
    behind: deque[Request] = field(default_factory=deque)  # waiting for a slot
    booked: int = 0  # requests that decode here
    tokens: float = 0.0  # tokens so far of a request that has been in the batch since the start
    since: float = 0.0
    version: int = 0  # of the scheduled end of a request
    counts: pb.EngineCounts = field(default_factory=pb.EngineCounts)

    @property
    def gap_s(self) -> float:
        return self.service.gap.at(len(self.batch)) + (
            CHUNK / self.service.prefill_tokens_per_s if self.queue else 0.0
        )

    def advance(self, now: float) -> None:
        """Account for the time until now."""
        passed, self.since = now - self.since, now
        if self.batch:
            got = passed / self.gap_s
            self.tokens += got
            self.counts.request_s += passed * len(self.batch)
            self.counts.output_tokens = round(self.counts.output_tokens + got * len(self.batch))
        if self.batch or self.queue:
            self.counts.busy_s += passed

    @property
    def queued_tokens(self) -> int:
        return sum(one.prompt for one, _ in self.queue)

    @property
    def idle(self) -> bool:
        return not (self.queue or self.batch or self.behind or self.booked)


def requests_of(phases: list[Phase], seed: int) -> list[Request]:
    """Return the requests of all phases in order of arrival."""
    draw = random.Random(seed)
    now, end, found = 0.0, 0.0, []
    for phase in phases:
        end += phase.seconds
        while (now := now + draw.expovariate(phase.per_s)) < end:
            found.append(Request(now, _length(draw, phase.prompt), max(2, _length(draw, phase.answer))))
        now = end
    return found


def simulate(
    requests: list[Request],
    service: Service,
    fleet: tuple[int, int],
    controller: Controller,
    *,
    places: int = 0,
    start_s: float = 0.0,
) -> Simulation:
    """Return the outcome of these requests. A new worker takes `start_s` to load."""
    made = Simulation(requests, service, fleet, controller, places, start_s)
    made.run()
    return made


class Simulation:
    def __init__(
        self,
        requests: list[Request],
        service: Service,
        fleet: tuple[int, int],
        controller: Controller,
        places: int,
        start_s: float,
    ) -> None:
        self.counts: list[tuple[float, int, int]] = []  # s, prefill workers, decode workers
        self.orders: Counter[str] = Counter()
        self.errors: dict[str, list[float]] = {}  # of predictions, percent
        self._requests = requests
        self._service = service
        self._controller = controller
        self._start_s = start_s
        self._draw = random.Random(0)
        self._now = 0.0
        self._end = requests[-1].arrives
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._number = count()
        roles = [P] * fleet[0] + [D] * fleet[1]
        self._workers = {f"w{n}": Worker(f"w{n}", role, service, True) for n, role in enumerate(roles)}
        self._places = [pb.Place(name=f"w{n}") for n in range(max(places, len(roles)))]
        self._plan: dict[str, dict[str, pb.Role]] = {}
        self._waiting: deque[Request] = deque()
        self._load = pb.RouterLoad()
        self._prompts, self._first, self._gap = Histogram(TOKENS), Histogram(SECONDS), Histogram(SECONDS)

    @property
    def within(self) -> float:
        """The share of requests within both goals."""
        goals = self._controller.goals
        return statistics.fmean(one.within(goals.first_token_s, goals.gap_s) for one in self._requests)

    def run(self) -> None:
        for one in self._requests:
            self._at(one.arrives, self._arrive, one)
        self._at(0.0, self._decide)
        self._at(0.0, self._sample)
        while self._events:
            self._now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)

    def _at(self, when: float, call: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._number), call, arguments))

    # Requests.

    def _arrive(self, one: Request) -> None:
        self._prompts.add(one.prompt)
        self._load.prompt_tokens += one.prompt
        if self._waiting or not self._place(one):
            self._waiting.append(one)

    def _place(self, one: Request) -> bool:
        limit = QUEUE_FACTOR * self._service.slots
        decoders = [w for w in self._ready(D) if w.booked < limit]
        prefillers = self._ready(P)
        if not decoders or not prefillers:
            return False
        decoder = min(self._two(decoders), key=lambda w: w.booked)
        decoder.booked += 1
        reader = min(self._two(prefillers), key=lambda w: w.queued_tokens)
        reader.advance(self._now)
        reader.queue.append((one, decoder))
        if len(reader.queue) == 1:
            self._prefill(reader)
            self._next_end(reader)
        return True

    def _two(self, workers: list[Worker]) -> list[Worker]:
        return self._draw.sample(workers, min(2, len(workers)))

    def _ready(self, role: pb.Role) -> list[Worker]:
        return [w for w in self._workers.values() if w.role == role and w.ready and not w.leaving]

    def _prefill(self, worker: Worker) -> None:
        one, decoder = worker.queue[0]
        took_s = one.prompt / self._service.prefill_tokens_per_s
        self._at(self._now + took_s, self._prefilled, worker, decoder)

    def _prefilled(self, worker: Worker, decoder: Worker) -> None:
        worker.advance(self._now)
        one, _ = worker.queue.popleft()
        worker.counts.computed_tokens += one.prompt
        worker.counts.output_tokens += 1
        if worker.queue:
            self._prefill(worker)
        self._next_end(worker)
        self._leave(worker)
        one.first = self._now
        self._first.add(self._now - one.arrives)
        decoder.advance(self._now)
        if len(decoder.batch) < self._service.slots:
            self._admit(decoder, one)
        else:
            decoder.behind.append(one)

    def _admit(self, worker: Worker, one: Request) -> None:
        heapq.heappush(worker.batch, (worker.tokens + one.answer - 1, next(self._number), one))
        self._next_end(worker)

    def _next_end(self, worker: Worker) -> None:
        worker.version += 1
        if worker.batch:
            left = max(0.0, worker.batch[0][0] - worker.tokens)
            self._at(self._now + left * worker.gap_s, self._finish, worker, worker.version)

    def _finish(self, worker: Worker, version: int) -> None:
        if version != worker.version:
            return
        worker.advance(self._now)
        _, _, one = heapq.heappop(worker.batch)
        one.ended = self._now
        worker.booked -= 1
        self._load.over += 1
        self._load.output_tokens += one.answer
        self._gap.add((one.ended - one.first) / (one.answer - 1))
        if worker.behind:
            self._admit(worker, worker.behind.popleft())
        self._next_end(worker)
        self._leave(worker)
        self._place_waiting()

    def _place_waiting(self) -> None:
        while self._waiting and self._place(self._waiting[0]):
            self._waiting.popleft()

    # Workers.

    def _leave(self, worker: Worker) -> None:
        if worker.leaving and worker.idle:
            self._workers.pop(worker.name, None)

    def _decide(self) -> None:
        for worker in self._workers.values():
            worker.advance(self._now)
            self._next_end(worker)
        decision = self._controller.step(self._seen())
        self._plan = {key: dict(value) for key, value in decision.plan.items()}
        for member, role in decision.flips:
            self._workers[member.name].role = role
            self.orders["flip"] += 1
        for name, role in decision.starts:
            self._workers[name] = Worker(name, role, self._service, False, since=self._now)
            self._at(self._now + self._start_s, self._started, self._workers[name])
            self.orders["start"] += 1
        for name in [one for one in self._workers if one not in self._plan["fleet"]]:
            if not self._workers[name].leaving:
                self.orders["stop"] += 1
                self._workers[name].leaving = True
            self._leave(self._workers[name])
        self._place_waiting()
        if decision.settled is not None:
            for what, error in decision.settled.predicted.errors(decision.settled.came).items():
                self.errors.setdefault(what, []).append(error)
        if self._now < self._end:
            self._at(self._now + self._controller.goals.interval_s, self._decide)

    def _started(self, worker: Worker) -> None:
        worker.ready = True
        self._place_waiting()

    def _seen(self) -> Seen:
        load = pb.RouterLoad(
            prompts=self._prompts.counts, first_token=self._first.counts, gap=self._gap.counts
        )
        load.MergeFrom(self._load)
        load.waiting = len(self._waiting)
        members = [self._member(one) for one in self._workers.values()]
        return Seen(self._now, members, {"router": load}, {"fleet": self._places}, self._plan)

    def _member(self, one: Worker) -> Member:
        counts = pb.EngineCounts()
        counts.CopyFrom(one.counts)
        load = pb.WorkerLoad(running=len(one.batch), waiting=len(one.behind), counts=counts)
        requests = one.booked + len(one.queue)
        ready = one.ready and not one.leaving
        return Member(
            *(one.name, one.name, one.role, ready, one.leaving, True, load),
            *(one.queued_tokens, requests, self._service.slots),
        )

    def _sample(self) -> None:
        there = Counter(one.role for one in self._workers.values())
        self.counts.append((self._now, there[P], there[D]))
        if self._now + SAMPLE_S <= self._end:
            self._at(self._now + SAMPLE_S, self._sample)


def _length(draw: random.Random, mean: float) -> int:
    return max(1, round(draw.lognormvariate(math.log(mean) - SPREAD * SPREAD / 2, SPREAD)))
