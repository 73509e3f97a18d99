"""A deployment in steps of 50 ms, which the controller under test scales.

Simulated: Poisson arrivals with log-normal prompt and answer lengths; placement on the least loaded workers;
prefill in order of arrival; decoding, where the gap between tokens grows with the batch; requests that wait
for room; workers that load, drain, and change roles while they finish earlier work. Not simulated: the time
of handoffs, prefix caches, full KV caches, failures.
"""

import math
import random
import statistics
from collections import Counter, deque, namedtuple
from dataclasses import dataclass, field

from baton.autoscale.histogram import SECONDS, TOKENS, Histogram
from baton.autoscale.seen import Member, Seen
from baton.protos import scheduler_pb2 as pb

P, D = pb.ROLE_PREFILL, pb.ROLE_DECODE
STEP_S = 0.05
SPREAD = 0.6  # standard deviation of the logarithm of lengths
QUEUE_FACTOR = 1.25  # MAX_QUEUE_FACTOR of the settings
CHUNK = 256  # prompt tokens in a step that also decodes


Phase = namedtuple("Phase", "seconds per_s prompt answer")  # a period of steady load; mean tokens


Service = namedtuple("Service", "prefill_tokens_per_s gap slots")  # of one worker


@dataclass(slots=True, eq=False)
class Request:
    arrives: float
    prompt: int
    answer: int
    left: float = 0.0  # seconds to prefill, later tokens to generate
    first: float = 0.0
    ended: float = 0.0

    def within(self, first_token_s, gap_s):
        early = bool(self.first) and self.first - self.arrives <= first_token_s
        return early and bool(self.ended) and self.ended - self.first <= gap_s * max(1, self.answer - 1)


@dataclass(slots=True, eq=False)
class Worker:
    """A worker. It may have work of both roles after a change."""

    name: str
    role: pb.Role
    service: Service
    ready_at: float = 0.0
    leaving: bool = False
    queue: deque = field(default_factory=deque)  # (request, its decode worker) to prefill
    batch: list[Request] = field(default_factory=list)
    behind: deque[Request] = field(default_factory=deque)  # requests that wait for a slot
    booked: int = 0  # requests that decode here
    generated: float = 0.0
    counts: pb.EngineCounts = field(default_factory=pb.EngineCounts)

    def queued_tokens(self):
        return sum(one.prompt for one, _ in self.queue)

    def prefill(self, now):
        """Run prompts for a step; return those that are complete."""
        done, left_s = [], STEP_S
        while self.queue and left_s > 0:
            one, decoder = self.queue[0]
            used_s = min(left_s, one.left)
            one.left -= used_s
            left_s -= used_s
            if one.left > 0:
                break
            self.queue.popleft()
            one.first, one.left = now + STEP_S - left_s, one.answer - 1
            decoder.behind.append(one)
            self.counts.computed_tokens += one.prompt
            self.generated += 1
            done.append(one)
        self.counts.busy_s += STEP_S - left_s
        return done

    def decode(self, now):
        """Generate tokens for a step; return the requests that have ended."""
        while self.behind and len(self.batch) < self.service.slots:
            self.batch.append(self.behind.popleft())
        if not self.batch:
            return []
        gap_s = self.service.gap.at(len(self.batch))
        gap_s += CHUNK / self.service.prefill_tokens_per_s if self.queue else 0.0
        for one in self.batch:
            one.left -= STEP_S / gap_s
        self.generated += len(self.batch) * STEP_S / gap_s
        self.counts.request_s += len(self.batch) * STEP_S
        self.counts.busy_s += 0.0 if self.queue else STEP_S
        ended = [one for one in self.batch if one.left <= 0]
        self.batch = [one for one in self.batch if one.left > 0]
        self.booked -= len(ended)
        for one in ended:
            one.ended = now + STEP_S + one.left * gap_s
        return ended


def requests_of(phases, seed):
    draw = random.Random(seed)
    now, end, found = 0.0, 0.0, []
    for phase in phases:
        end += phase.seconds
        while (now := now + draw.expovariate(phase.per_s)) < end:
            found.append(Request(now, _length(draw, phase.prompt), max(2, _length(draw, phase.answer))))
        now = end
    return found


class Simulation:
    """The outcome of some requests. A new worker takes `start_s` to load."""

    def __init__(self, requests, service, fleet, controller, *, places=0, start_s=0.0):
        self.counts = {}  # second -> prefill workers, decode workers
        self.orders = Counter()
        self.errors = {}  # errors of the predictions, in percent
        self._requests = requests
        self._service = service
        self._controller = controller
        self._start_s = start_s
        self._now = 0.0
        roles = [P] * fleet[0] + [D] * fleet[1]
        self._workers = {f"w{n}": Worker(f"w{n}", role, service) for n, role in enumerate(roles)}
        self._places = [pb.Place(name=f"w{n}") for n in range(max(places, len(roles)))]
        self._plan = {}
        self._waiting = deque()
        self._load = pb.RouterLoad()
        self._prompts, self._first, self._gap = Histogram(TOKENS), Histogram(SECONDS), Histogram(SECONDS)
        self._run()

    @property
    def within(self):
        """The share of requests within both goals."""
        goals = self._controller.goals
        return statistics.fmean(one.within(goals.first_token_s, goals.gap_s) for one in self._requests)

    def _run(self):
        coming, last = deque(self._requests), self._requests[-1].arrives
        decide_every = round(self._controller.goals.interval_s / STEP_S)
        step = 0
        while self._load.over < len(self._requests):
            self._now = step * STEP_S
            if step % decide_every == 0 and self._now < last:
                self._decide()
            there = Counter(one.role for one in self._workers.values())
            self.counts[int(self._now)] = there[P], there[D]
            while coming and coming[0].arrives <= self._now:
                self._arrive(coming.popleft())
            while self._waiting and self._place(self._waiting[0]):
                self._waiting.popleft()
            for worker in list(self._workers.values()):
                self._work(worker)
            step += 1

    def _arrive(self, one):
        self._prompts.add(one.prompt)
        self._load.prompt_tokens += one.prompt
        self._waiting.append(one)

    def _place(self, one):
        decoders = [w for w in self._ready(D) if w.booked < QUEUE_FACTOR * self._service.slots]
        prefillers = self._ready(P)
        if not decoders or not prefillers:
            return False
        decoder = min(decoders, key=lambda w: w.booked)
        decoder.booked += 1
        one.left = one.prompt / self._service.prefill_tokens_per_s
        min(prefillers, key=Worker.queued_tokens).queue.append((one, decoder))
        return True

    def _ready(self, role):
        there = self._workers.values()
        return [w for w in there if w.role == role and w.ready_at <= self._now and not w.leaving]

    def _work(self, worker):
        for one in worker.prefill(self._now):
            self._first.add(one.first - one.arrives)
        for one in worker.decode(self._now):
            self._load.over += 1
            self._load.output_tokens += one.answer
            self._gap.add((one.ended - one.first) / (one.answer - 1))
        if worker.leaving and not (worker.queue or worker.booked):
            del self._workers[worker.name]

    def _decide(self):
        decision = self._controller.step(self._seen())
        self._plan = {key: dict(value) for key, value in decision.plan.items()}
        for member, role in decision.flips:
            self._workers[member.name].role = role
        for name, role in decision.starts:
            self._workers[name] = Worker(name, role, self._service, self._now + self._start_s)
        for name, worker in self._workers.items():
            if name not in self._plan["fleet"] and not worker.leaving:
                self.orders["stop"] += 1
                worker.leaving = True
        self.orders["flip"] += len(decision.flips)
        self.orders["start"] += len(decision.starts)
        if decision.settled is not None:
            for what, error in decision.settled.predicted.errors(decision.settled.came).items():
                self.errors.setdefault(what, []).append(error)

    def _seen(self):
        load = pb.RouterLoad(
            prompts=self._prompts.counts, first_token=self._first.counts, gap=self._gap.counts
        )
        load.MergeFrom(self._load)
        load.waiting = len(self._waiting)
        members = [self._member(one) for one in self._workers.values()]
        return Seen(self._now, members, {"router": load}, {"fleet": self._places}, self._plan)

    def _member(self, one):
        counts = pb.EngineCounts(output_tokens=round(one.generated))
        counts.MergeFrom(one.counts)
        load = pb.WorkerLoad(running=len(one.batch), waiting=len(one.behind), counts=counts)
        ready = one.ready_at <= self._now and not one.leaving
        return Member(
            *(one.name, one.name, one.role, ready, one.leaving, True, load),
            *(one.queued_tokens(), one.booked + len(one.queue), self._service.slots),
        )


def _length(draw, mean):
    return max(1, round(draw.lognormvariate(math.log(mean) - SPREAD * SPREAD / 2, SPREAD)))
