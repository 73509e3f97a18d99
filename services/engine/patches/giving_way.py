"""Make requests of lower classes give way in an engine's steps, slots and KV.

vLLM schedules running requests before waiting ones, in order of arrival, and takes all that fit. Here, if
several classes want a step, requests that give way are left out of it as `StepShare` decides. They keep their
KV and take turns. If a first-class request finds no slot, or KV runs short, preemptible requests are
preempted as in vLLM, at most `MOST_PREEMPTIONS` times each, but not for a request that only reserves blocks.
While first-class requests keep arriving, steps without one are short (services/prefill/step_length.py).

A request's class is its attribute `standing`. If all requests are of one class, a step costs one look at each
request.

Leans on: a step may leave out any request of `running`; PAUSED_NEW admits only requests that hold KV;
long_prefill_token_threshold is read in each step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from baton.handoff.params import asks_for_load
from baton.services.decode.step_share import STANDARD, Contest, Standing, StepShare
from baton.services.engine.patches import accepted_states
from baton.services.engine.patches.replace import replace
from baton.services.engine.request_blocks import most_blocks
from baton.services.prefill.prompt_share import PromptShare
from baton.services.prefill.step_length import LATELY_S, StepLength

logger = logging.getLogger(__name__)

MOST_PREEMPTIONS = 3  # per request; each costs a slot and, at worst, all computation so far
MOST_SHARE = 0.9  # maximum share of all requests that give way, together


def standing_of(request: Any) -> Standing:
    found: Standing = getattr(request, "standing", STANDARD)
    return found


def _only_reserves(request: Any) -> bool:
    """Return whether a request is waiting for KV of a prompt that is still being computed elsewhere."""
    return not request.num_output_tokens and asks_for_load(request.kv_transfer_params)


@dataclass(slots=True)
class _Step:
    """A step in which some requests give way."""

    first: int  # priority of the first class
    contest: Contest | None  # None: first-class requests keep arriving, but none needs this step
    rows: set[str]  # ids of decoding requests that give way
    held: list[Any]  # requests that give way and are left out
    prefills: bool = False  # whether one more prompt that gives way may be computed
    new: bool = True  # whether all waiting requests may begin, or only those that hold KV
    most_new: int | None = None  # most waiting requests that may begin; None: as many as find a slot
    most_tokens: int | None = None  # None: as many as the engine takes
    output: Any = None
    others: int = 0  # tokens of requests that give way
    prompts: int = 0  # how many of those tokens belong to prompts


@dataclass(slots=True)
class _Scheduled:
    """A step whose results are awaited."""

    step: _Step | None  # None: no request gives way in it
    tokens: int
    prompts: bool  # whether it computes prompts: it has more tokens than its decoding requests could use
    launched_s: float = 0.0  # duration of the call that scheduled and launched it


@dataclass
class Yielded:
    """Counts since the last `take_counts`."""

    held: int = 0  # requests left out of a step
    preempted: int = 0


class GivingWay:
    """Decides which requests run in each step of a loaded engine. Call it on the engine's thread."""

    def __init__(self, scheduler: Any, *, rows_may_miss: bool = True, ahead: int = 0) -> None:
        """rows_may_miss: decoding requests may be left out; ahead: steps scheduled before results come."""
        from vllm.v1.core.sched.interface import PauseState

        self._scheduler = scheduler
        self._rows_may_miss = rows_may_miss
        self._most_blocks = most_blocks(scheduler)
        self._paused = PauseState.PAUSED_NEW
        self._share = StepShare()
        self._length = StepLength(scheduler.max_num_scheduled_tokens)
        self._first, self._first_at = STANDARD, -LATELY_S  # the latest first class, and when it was seen
        self._counts = Yielded()
        self._step: _Step | None = None  # the scheduled step, if some requests give way in it
        self._ahead = ahead
        self._flying: deque[_Scheduled] = deque(maxlen=1 + ahead)
        self._scheduled = False  # whether a step was scheduled since the last `observe`
        self._leaving: list[Any] = []  # requests left out of a step so that the next one can preempt them
        self._prompt_share: PromptShare | None = None
        self._idle = False  # the last step was empty without the requests left out, so leave out none
        replace(scheduler, "schedule", self._schedule)

    def observe(self, seconds: float) -> None:
        scheduled, self._scheduled = self._scheduled, False
        if scheduled and self._flying:
            self._flying[-1].launched_s = seconds
        if not self._flying or (scheduled and len(self._flying) <= self._ahead):
            return  # no step has ended
        ended = self._flying.popleft()
        step, total = ended.step, ended.tokens
        if not total:
            return
        # On a GPU an earlier call launched the step, which can take longer than computing it.
        seconds = max(seconds, ended.launched_s)
        if self._prompt_share is not None and ended.prompts:
            self._prompt_share.observe(total, seconds)
            self._scheduler.scheduler_config.long_prefill_token_threshold = self._prompt_share.tokens
        if step is None:
            return
        if step.most_tokens is not None and self._first.ttft_s:
            self._length.observe(step.prompts, seconds, self._first.ttft_s)
        if step.contest is None:
            self._share.observe_alone(seconds, step.prompts / total)
            return
        self._share.observe(
            step.contest,
            seconds,
            (step.others if step.contest.prompts else step.prompts) / total,
            len(step.rows & step.output.num_scheduled_tokens.keys()),
            held=not step.new or any(one.request_id in step.rows for one in step.held),
        )

    def step_failed(self) -> None:
        self._flying.clear()
        self._scheduled = False

    def measure_share(self, share: PromptShare) -> None:
        """From now on, derive a prompt's share of a mixed step from measured step times."""
        self._prompt_share = share

    def take_counts(self) -> Yielded:
        counts, self._counts = self._counts, Yielded()
        return counts

    def _schedule(self, original: Callable[..., Any], throttle_prefills: bool = False) -> Any:
        self._step = None
        output = self._divided(lambda: original(throttle_prefills))
        total = output.total_num_scheduled_tokens
        rows = len(output.num_scheduled_tokens) * (1 + self._scheduler.num_spec_tokens)
        self._flying.append(_Scheduled(self._step, total, prompts=total > rows))
        self._scheduled = True
        return output

    def _divided(self, schedule: Callable[[], Any]) -> Any:
        step = self._contested()
        if step is None:
            return schedule()
        scheduler, left_out = self._scheduler, {id(one) for one in step.held}
        scheduler.running[:] = [one for one in scheduler.running if id(one) not in left_out]
        before = scheduler.pause_state
        slots, tokens = scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens
        scheduler.max_num_active_reqs = slots - len(left_out)
        if step.most_new is not None:
            most = len(scheduler.running) + step.most_new
            scheduler.max_num_active_reqs = min(scheduler.max_num_active_reqs, most)
        if step.most_tokens is not None:
            scheduler.max_num_scheduled_tokens = min(tokens, step.most_tokens)
        if not step.new and not before:
            scheduler._pause_state = self._paused
        try:
            step.output = schedule()
        finally:
            scheduler._pause_state = before
            scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens = slots, tokens
            self._put_back(step)
        self._counts.held += len(left_out)
        self._idle = not step.output.total_num_scheduled_tokens and not self._leaving
        self._count(step)
        self._step = step
        return step.output

    def _put_back(self, step: _Step) -> None:
        """Put back the requests that were left out, before those that took part, so that they are next."""
        running = self._scheduler.running
        first = [one for one in running if standing_of(one).priority <= step.first]
        took_part = [one for one in running if standing_of(one).priority > step.first]
        running[:] = first + step.held + took_part

    def _count(self, step: _Step) -> None:
        row = 1 + self._scheduler.num_spec_tokens
        for name, count in step.output.num_scheduled_tokens.items():
            if standing_of(self._scheduler.requests[name]).priority > step.first:
                step.others += count
                # A request that began in this step may also decode, if its KV was loaded.
                step.prompts += count if count > row and name not in step.rows else 0

    def _contested(self) -> _Step | None:
        """Return how to share a step in which requests give way, or None if all may take part."""
        scheduler, idle = self._scheduler, self._idle
        self._idle, self._leaving = False, []
        waits = self._next()
        wanting = scheduler.running if waits is None else [*scheduler.running, waits]
        if not wanting or idle:
            return None
        goes_first = min(map(standing_of, wanting), key=lambda one: one.priority)
        best, now = goes_first.priority, time.monotonic()
        if best <= self._first.priority or now - self._first_at > LATELY_S:
            self._first, self._first_at = goes_first, now
        if waits is not None and standing_of(waits).priority == best:
            # the first waiting request that gives way, which vLLM might start in the same step
            lower_ones = (one for one in self._startable() if standing_of(one).priority > best)
            wanting = [*wanting, *islice(lower_ones, 1)]
        if all(standing_of(one).priority == best for one in wanting):
            return self._alone() if best > self._first.priority else None
        newcomer = waits if standing_of(waits).priority == best else None
        reserves = newcomer is not None and _only_reserves(newcomer)
        preempted = self._make_room(best, None if reserves else newcomer)
        if preempted is None:
            return None
        first = [one for one in scheduler.running if standing_of(one).priority == best]
        lower = [one for one in scheduler.running if standing_of(one).priority > best]
        prompts = sum(one.is_prefill_chunk for one in first)
        decoding = [standing_of(one) for one in first if not one.is_prefill_chunk]
        decodes = newcomer is not None and self._is_loaded(newcomer)
        if decodes:
            decoding.append(standing_of(newcomer))
        elif newcomer is not None:
            prompts += 1
        giving = {standing_of(one).priority: standing_of(one).share for one in wanting}
        contest = Contest(
            first_rows=len(decoding),
            prompts=prompts > 0,
            goal_s=min((one.itl_s for one in decoding if one.itl_s), default=0.0),
            share=min(MOST_SHARE, sum(share for priority, share in giving.items() if priority > best)),
        )
        # A chunk of a prompt could take the tokens of a request whose KV has arrived.
        prefills = self._share.may_prefill and not decodes
        step = self._choose(best, contest, lower, waits if newcomer is None else None, prefills)
        step.held += [one for one in self._leaving if one not in step.held]
        step.new = step.new and (newcomer is not None or not preempted)
        if decodes or (newcomer is not None and not step.prefills):
            step.most_new = self._first_in_line(best)
        if not contest.prompts or best > self._first.priority:
            step.most_tokens = self._most_tokens(step.held)
        return step

    def _alone(self) -> _Step:
        rows = {one.request_id for one in self._scheduler.running if not one.is_prefill_chunk}
        return _Step(self._first.priority, None, rows, [], most_tokens=self._most_tokens([]))

    def _most_tokens(self, held: Sequence[Any]) -> int | None:
        """Return how many tokens a step before first-class prompts may have; None: no limit."""
        scheduler, left_out = self._scheduler, {id(one) for one in held}
        if not self._first.ttft_s or not scheduler.scheduler_config.enable_chunked_prefill:
            return None
        decoding = (one for one in scheduler.running if not one.is_prefill_chunk and id(one) not in left_out)
        rows: int = sum(
            one.num_tokens_with_spec + one.num_output_placeholders - one.num_computed_tokens
            for one in decoding
        )
        return self._length.tokens + rows

    def _next(self) -> Any:
        """Return the startable request of the highest class, or None."""
        scheduler = self._scheduler
        found = sorted(scheduler.requests[name] for name in scheduler.finished_recving_kv_req_ids)
        found += islice((one for one in self._startable() if not self._finds_no_room(one)), 1)
        return min(found, key=lambda one: standing_of(one).priority, default=None)

    def _startable(self) -> Iterator[Any]:
        """Yield, in the queue's order, the waiting requests that need only room."""
        scheduler = self._scheduler
        return (one for one in scheduler.waiting if one not in scheduler.deferred_waiting)

    def _finds_no_room(self, one: Any) -> bool:
        """Return whether a request only reserves blocks and finds too few, so it must not preempt."""
        scheduler = self._scheduler
        return _only_reserves(one) and (
            len(scheduler.running) >= scheduler.max_num_active_reqs
            or scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < self._most_blocks(one.num_tokens)
        )

    def _is_loaded(self, waits: Any) -> bool:
        """Return whether a waiting request has all its KV from another worker, so that it can decode."""
        loaded = waits.request_id in self._scheduler.finished_recving_kv_req_ids
        return loaded and waits.num_output_tokens > 0 and waits.num_tokens - waits.num_computed_tokens <= 1

    def _first_in_line(self, best: int) -> int:
        """Return how many waiting requests could begin before the first one that gives way."""
        ahead = takewhile(lambda one: standing_of(one).priority <= best, self._startable())
        return len(self._scheduler.finished_recving_kv_req_ids) + sum(1 for _ in ahead)

    def _choose(self, best: int, contest: Contest, lower: Sequence[Any], waits: Any, prefills: bool) -> _Step:
        """Decide what to leave out. waits: the next request to begin; prefills: a prompt may be computed."""
        step = _Step(best, contest, set(), [])
        rows = self._share.rows(contest)
        for one in lower:
            if one.is_prefill_chunk:
                takes_part, prefills = prefills, False  # one prompt at a time
            else:
                step.rows.add(one.request_id)
                takes_part = rows >= 1 or not self._rows_may_miss
                rows -= takes_part
            if not takes_part:
                step.held.append(one)
        step.prefills = prefills
        if waits is not None and waits.priority > time.monotonic() * 1e3:  # else it has waited long enough
            step.new = rows >= 1 if waits.num_output_tokens else prefills
        return step

    def _make_room(self, best: int, newcomer: Any) -> int | None:
        """Preempt as many requests as the first class needs for slots and KV. Return their number.

        Return None if that does not suffice; vLLM then chooses among all requests. `_leaving` gets requests
        that can only be preempted after the next step.
        """
        scheduler = self._scheduler
        pool, most = scheduler.kv_cache_manager.block_pool, scheduler.max_num_scheduled_tokens
        first = [one for one in scheduler.running if standing_of(one).priority == best]
        tokens = min(most, sum(one.num_tokens_with_spec - one.num_computed_tokens for one in first))
        # Each request may begin a block, and another one with its drafts.
        groups = len(scheduler.kv_cache_config.kv_cache_groups)
        wanted = self._most_blocks(tokens, len(first)) + (2 * len(first) + 1) * groups
        if newcomer is not None:
            wanted += self._most_blocks(newcomer.num_tokens - newcomer.num_computed_tokens)
        slot = newcomer is not None and len(scheduler.running) >= scheduler.max_num_active_reqs
        allowed = sorted(one for one in scheduler.running if self._may_preempt(one, best, newcomer))
        # The last one in the queue's order is preempted first.
        victims = [one for one in allowed if scheduler._request_blocks_can_be_freed(one)]
        preempted = 0
        while victims and (slot or pool.get_num_free_blocks() < wanted):
            victim, slot = victims.pop(), False
            scheduler.running.remove(victim)
            scheduler._preempt_request(victim, time.monotonic(), scheduler.requires_kv_delivery)
            preempted += 1
        self._counts.preempted += preempted
        lacks = pool.get_num_free_blocks() < wanted
        if (slot or lacks) and self._rows_may_miss:
            # A step in flight may still write to a request's blocks. If the next step leaves the request out,
            # the step after that can preempt it.
            self._leaving = [one for one in allowed if one in scheduler.running][-1:]
        return None if lacks and not self._leaving else preempted

    def _may_preempt(self, one: Any, best: int, newcomer: Any) -> bool:
        standing = standing_of(one)
        # A prompt whose KV is being saved for another worker must not start again.
        whole = one.kv_transfer_params is None or not (one.is_prefill_chunk or one.num_output_tokens == 0)
        return (
            whole
            and standing.preemptible
            and standing.priority > best
            and one.num_preemptions < MOST_PREEMPTIONS
            and (newcomer is None or newcomer < one)
        )


def install(engine: Any, *, measured_share: bool = False) -> GivingWay | None:
    """Let requests give way from now on; None if vLLM has no priorities. measured_share: see PromptShare."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    if engine.scheduler.policy != SchedulingPolicy.PRIORITY:
        return None
    may_miss = accepted_states.keeps(engine.vllm_config)
    if not may_miss:
        logger.warning(
            "classes: decoding requests are not left out of steps, because this model keeps states and "
            "drafts with a prefix cache, asynchronous scheduling or model runner V2"
        )
    ahead = engine.batch_queue_size - 1 if engine.batch_queue is not None else 0
    seam = GivingWay(engine.scheduler, rows_may_miss=may_miss, ahead=ahead)
    if measured_share:
        config = engine.vllm_config.scheduler_config
        seam.measure_share(PromptShare(config.long_prefill_token_threshold, config.max_num_batched_tokens))
    return seam
