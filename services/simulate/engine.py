"""A simulated engine: steps with chunks of prompts and decoding requests, on virtual time.

The profile's curves give the time of a step. Prompts are queued and cut into chunks by Baton's own fair
share. Several decode steps are simulated at once, until a request ends or arrives or the cache is full.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from baton.protos import scheduler_pb2 as pb
from baton.services.prefill.fair_share import priority, share_of
from baton.services.simulate.cache import Cache, Held
from baton.services.simulate.figures import Gaps
from baton.services.simulate.profile import Profile

MOST_STEPS = 64  # simulated at once, as if contexts did not grow


class TooLarge(Exception):
    """The request does not fit even into an idle engine."""


@dataclass(slots=True, eq=False)
class Job:
    """One request in an engine. `given`: the KV of its prompt is handed over, not computed."""

    hashes: Sequence[int]  # block hashes of the prompt, and of the known part of the answer
    prompt: int  # tokens, including output of earlier attempts
    output: int  # tokens to generate here
    given: bool
    over: asyncio.Future[None]  # raises TooLarge
    patience_ms: int = 0
    order: int = 0  # position in the queue; the lowest goes first
    hit: int = 0  # prompt tokens found in the prefix cache
    computed: int = 0  # prompt tokens whose KV is in the cache
    first_piece_at: float = 0.0  # end of the first step with a chunk of it
    last_piece: int = 0  # tokens of its last chunk
    first_at: float = 0.0  # time of its first token, at the prompt's end
    next_at: float = 0.0  # time of the first token decoded here
    held: Held = field(default_factory=Held)
    joined: float = 0.0  # the engine's `_progress` when it began to decode
    left: float = 0.0  # tokens still to generate at that time
    admitted: bool = False


class Machine:
    """Shared by the engines of a deployment: statistics of gaps, and the cores if limited."""

    def __init__(self, cores: int) -> None:
        """Share `cores` among the engines; with 0, each engine has its own core."""
        self.gaps = Gaps()
        self.cores = cores
        self._stepping: Counter[int] = Counter()  # core -> engines with a step under way

    def begin(self, core: int) -> None:
        """Record that an engine on this core has started to run steps."""
        self._stepping[core] += 1

    def end(self, core: int) -> None:
        """Record that an engine on this core has stopped."""
        self._stepping[core] -= 1

    def slower(self, core: int) -> float:
        """Return the factor by which a step that begins now on this core is slower."""
        return max(1.0, self._stepping[core]) if self.cores else 1.0


class SimulatedEngine:
    """One engine."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        profile: Profile,
        block_tokens: int,
        machine: Machine,
        number: int = 0,
    ) -> None:
        """Create an idle engine. `number` selects its core if cores are shared."""
        self._loop = loop
        self._profile = profile
        self._block = block_tokens
        self._machine = machine
        self._core = number % machine.cores if machine.cores else number
        self.cache = Cache(max(1, profile.engine.kv_tokens // block_tokens))
        self.counts = pb.EngineCounts()
        self.busy_s = 0.0
        self._waiting: list[tuple[int, int, Job]] = []  # heap
        self._prompts: list[Job] = []  # jobs whose prompts are being computed
        self._decoding: list[tuple[float, int, Job]] = []  # heap, ordered by the `_progress` at jobs' ends
        self._number = count()
        self._progress = 0.0  # tokens that a request decoding since the start would have generated
        self._joined = 0.0  # sum of `joined` over decoding jobs
        self._context = 0  # sum of the prompts of decoding jobs
        self._timer: asyncio.TimerHandle | None = None  # fires at the end of the current steps
        self._began, self._step_s, self._steps = 0.0, 0.0, 0
        self._pieces: list[tuple[Job, int]] = []
        self._aborted: list[Job] = []  # dropped at the end of the current step
        self._joining = 0  # requests in their first decode step, which have no gap yet

    @property
    def running(self) -> int:
        return len(self._prompts) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Queue a request. `job.over` is done when it ends."""
        now, tokens = self._loop.time(), 0 if job.given else job.prompt
        job.order = priority(now, tokens, handed_over=job.given, patience_ms=job.patience_ms)
        heapq.heappush(self._waiting, (job.order, next(self._number), job))
        if self._timer is None:
            self._begin()
        else:  # it joins after the current step
            self._cut()

    def abort(self, job: Job) -> None:
        """Drop a request at the end of the current step."""
        if self._timer is not None:  # otherwise it has ended
            self._aborted.append(job)
            self._cut()

    def _begin(self) -> None:
        """Begin the next step or steps, if there are requests."""
        self._grow()
        while self.cache.free < 0 and len(self._decoding) > 1:
            self._preempt()
        joined, pieces = self._compose()
        self._pieces = pieces
        requests = len(self._decoding)
        if not pieces and not requests:
            self._stop_stepping()
            return
        tokens = sum(piece for _, piece in pieces)
        pairs = sum(piece * job.computed for job, piece in pieces)
        context = self._context + requests * self._progress - self._joined
        pace = self._profile.pace
        if self._timer is None:
            self._machine.begin(self._core)
        self._step_s = pace.step_s(tokens, pairs, requests, context) * self._machine.slower(self._core)
        self._began = self._loop.time()
        steps = 1
        if not pieces:
            ends = self._decoding[0][0] - self._progress
            room = max(1, self.cache.free) * self._block / requests
            steps = max(1, min(math.ceil(min(ends, room) / pace.accepted - 1e-9), MOST_STEPS))
        for job in joined:
            job.next_at = job.next_at or self._began + self._step_s
        self._joining = len(joined)
        self._plan(steps)

    def _plan(self, steps: int) -> None:
        self._steps = steps
        self._timer = self._loop.call_at(self._began + steps * self._step_s, self._end)

    def _cut(self) -> None:
        """Cut the current group of steps off after the step that has begun."""
        if self._timer is None or self._steps == 1:
            return
        done = max(1, math.ceil((self._loop.time() - self._began) / self._step_s - 1e-9))
        if done < self._steps:
            self._timer.cancel()
            self._plan(done)

    def _end(self) -> None:
        self._advance(self._steps)
        now = self._loop.time()
        for job, piece in self._pieces:
            job.computed += piece
            job.last_piece = piece
            job.first_piece_at = job.first_piece_at or now
            self.counts.computed_tokens += piece
            self.cache.name(job.held, job.hashes, min(job.computed // self._block, len(job.hashes)))
            if job.computed == job.prompt:
                self._prompts.remove(job)
                job.first_at = job.first_at or now
                self.counts.output_tokens += 1
                self._join(job, job.output - 1)
        self._pieces = []
        while self._decoding and self._decoding[0][0] <= self._progress + 1e-9:
            job = heapq.heappop(self._decoding)[2]
            self._leave(job)
            # The last token has no KV.
            full = min((job.prompt + job.output - 1) // self._block, len(job.hashes))
            self.cache.release(job.held, job.hashes, full)
            if not job.over.done():  # otherwise its request timed out
                job.over.set_result(None)
        for job in self._aborted:
            self._drop(job)
        self._aborted = []
        self._begin()

    def _advance(self, steps: int) -> None:
        """Complete `steps` of the current steps."""
        pace, requests, took_s = self._profile.pace, len(self._decoding), steps * self._step_s
        self.busy_s += took_s
        self.counts.busy_s += took_s
        if requests:
            self.counts.request_s += took_s * requests
            self._progress += steps * pace.accepted
            got = round(steps * pace.accepted * requests)
            self.counts.output_tokens += got
            self._machine.gaps.add(self._step_s / pace.accepted, max(0, got - self._joining))
            self._joining = 0

    def _compose(self) -> tuple[list[Job], list[tuple[Job, int]]]:
        """Return the requests that start to decode, and the prompt chunks of the next step, in tokens."""
        engine = self._profile.engine
        budget = engine.step_tokens - len(self._decoding)
        prompts = len(self._prompts) + sum(not job.given for *_, job in self._waiting[: engine.batch])
        share = engine.step_tokens
        if prompts > 1:
            share = max(share_of(share), share // prompts)
        pieces: list[tuple[Job, int]] = []
        for job in self._prompts:
            if budget <= 0:
                break
            piece = min(job.prompt - job.computed, share, budget)
            pieces.append((job, piece))
            budget -= piece
        joined = []
        while self._waiting and self.running < engine.batch and budget > 0:
            job = self._waiting[0][2]
            if job.over.done():
                heapq.heappop(self._waiting)
                continue
            if not self._admit(job):
                if self.running:
                    break
                heapq.heappop(self._waiting)
                job.over.set_exception(TooLarge())
                continue
            heapq.heappop(self._waiting)
            if job.given:
                self._join(job, job.output)
                joined.append(job)
                budget -= 1
                continue
            self._prompts.append(job)
            piece = min(job.prompt - job.computed, share, budget)
            pieces.append((job, piece))
            budget -= piece
        return joined, pieces

    def _admit(self, job: Job) -> bool:
        """Allocate a request's blocks; return False if there is no room."""
        hashes, cache = job.hashes, self.cache
        hit = cache.hit(hashes[: (job.prompt - 1) // self._block])
        found, blocks = hashes[:hit], -(-(job.prompt + 1) // self._block)
        if not cache.fits(found, blocks):
            return False
        job.held = cache.take(found, blocks)
        if job.given:
            job.computed = job.prompt
            cache.name(job.held, hashes, min(job.prompt // self._block, len(hashes)))
        else:
            job.computed = hit * self._block
            self.counts.prefix_queries += job.prompt
            self.counts.prefix_hits += job.computed
            if not job.admitted:
                job.hit = job.computed
        job.admitted = True
        return True

    def _join(self, job: Job, tokens: float) -> None:
        job.joined, job.left = self._progress, tokens
        heapq.heappush(self._decoding, (self._progress + tokens, next(self._number), job))
        self._joined += job.joined
        self._context += job.prompt

    def _leave(self, job: Job) -> None:
        """Subtract a job, already removed from the heap, from the sums."""
        self._joined -= job.joined
        self._context -= job.prompt
        self._grow()

    def _grow(self) -> None:
        tokens = len(self._decoding) * self._progress - self._joined
        self.cache.grown = max(0, math.ceil(tokens / self._block - 1e-6))
        self.cache.trim()

    def _preempt(self) -> None:
        """Preempt the request that started to decode last; it is recomputed later."""
        place = max(range(len(self._decoding)), key=lambda at: self._decoding[at][1])
        job = self._interrupt(place)
        left = max(1, math.ceil(job.left - (self._progress - job.joined)))
        self.cache.release(job.held)
        job.prompt += job.output - left
        job.output, job.given, job.computed = left, False, 0
        heapq.heappush(self._waiting, (job.order, next(self._number), job))

    def _drop(self, job: Job) -> None:
        """Remove an aborted request from the batch or the queue."""
        place = next((at for at, (*_, one) in enumerate(self._decoding) if one is job), None)
        if place is not None:
            self._interrupt(place)
        elif job in self._prompts:
            self._prompts.remove(job)
        else:
            self._waiting = [one for one in self._waiting if one[2] is not job]
            heapq.heapify(self._waiting)
        self.cache.release(job.held)

    def _interrupt(self, place: int) -> Job:
        job = self._decoding.pop(place)[2]
        heapq.heapify(self._decoding)
        self._leave(job)
        return job

    def _stop_stepping(self) -> None:
        if self._timer is not None:
            self._timer = None
            self._machine.end(self._core)
