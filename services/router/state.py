"""Hold the state of a router's requests, and limit the memory that they take (`Journal`).

A RequestState has what another worker needs to resume a request: prompt, sampling parameters, output tokens
and epoch. It is kept only in this process: when a router dies, its clients lose their connections anyway.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.machine import memory
from baton.prefix_keys import NO_KEYS, PromptKeys
from baton.protos import scheduler_pb2, worker_pb2
from baton.scheduler.client import Placement
from baton.scheduler.need import Adapter
from baton.services.classes import STANDARD, ServiceClass
from baton.services.router.errors import NotAdmitted, Overloaded, Why
from baton.services.router.images import Image, ImageBudget
from baton.services.router.recovery import Failure, Toll, Trouble
from baton.services.router.suspects import Suspicion
from baton.services.router.timings import Event, HttpTimes, Process, Spent, Timings, process_of
from baton.services.trace_context import TraceContext, begin

# Sizes in the journal, bytes.
TOKEN_BYTES = 5  # array("I") takes 4 per token, and over-allocates by an eighth
REQUEST_BYTES = 4096  # a request's objects without its message and tokens
KEY_BYTES = 40  # the key of a block of the prompt
LOGPROB_BYTES = 400  # a log-probability in vLLM's front end
ROOM_TOKENS = 256  # a request's reservation grows by this many tokens
JOURNAL_BYTES = 256 << 20  # the journal's least limit
GROWTH = 2  # running requests may grow to this many times the limit
_RETRY_AFTER_S = 1.0
KEPT = 16  # attempts and events that are kept; the number of attempts is not limited


class Party(NamedTuple):
    """The sender of a request, for fair queueing."""

    tenant: str = ""
    client: str = ""  # one of the tenant's clients
    weight: int = 1  # the tenant's turns per turn of a tenant with weight 1

    @property
    def holder(self) -> str:
        """The holder of a limit: the tenant or, without tenants, the client if it is known."""
        return self.tenant or self.client

    @property
    def number(self) -> int:
        """A hash that identifies the sender to workers without naming it."""
        named = f"{self.tenant}\0{self.client}".encode(errors="surrogatepass")
        return int.from_bytes(hashlib.sha256(named).digest()[:8], "big")


NOBODY = Party()


@dataclass(slots=True)
class RequestState:
    """One request across all its attempts, with everything that a worker needs to resume it.

    Invariants: `tokens` only grows, up to `budget`, and each token is handed to the front end exactly once.
    `epoch` only grows, and no two Starts of one phase have the same epoch. With up to `room_tokens` tokens
    its memory stays below `journal_bytes`. Nothing changes once `outcome` is set.
    """

    request_id: str  # used by workers and the scheduler
    frontend_id: str  # the request's id in vLLM's front end
    engine_request: bytes  # encoded prompt and sampling parameters, the same in every attempt
    prompt_tokens: int
    max_tokens: int  # output tokens asked for
    max_model_len: int
    deadline: float  # time.monotonic, seconds
    logprobs: int = 0  # number per output token
    prompt_logprobs: int = 0  # number for the whole prompt
    room_tokens: int = ROOM_TOKENS  # output tokens for which the journal has reserved memory
    party: Party = NOBODY
    service: ServiceClass = STANDARD
    prefix: PromptKeys = NO_KEYS
    images: tuple[Image, ...] = ()  # the prompt's, in order; an image may occur twice
    image_places: tuple[range, ...] = ()  # each image's tokens in the prompt
    model: str = ""  # the name under which it is served
    adapter: Adapter | None = None
    tokens: array[int] = field(default_factory=lambda: array("I"))
    epoch: int = 0
    attempts: int = 0  # placements so far
    failures: Toll = field(default_factory=Toll)  # workers that failed it since its last progress
    suspicion: Suspicion = field(default_factory=Suspicion)
    excluded: set[str] = field(default_factory=set)  # workers that failed it, to be avoided
    encodes_failed: Counter[str] = field(default_factory=Counter)  # keyed by image name: see encodes.py
    prefill_workers: list[str] = field(default_factory=list)  # each worker that prefilled it, once
    decode_workers: list[str] = field(default_factory=list)  # each worker that decoded it, once
    model_fingerprint: str = ""  # fingerprint of the last decode worker's weights
    method: str = ""  # the last decode worker's speculative method
    outcome: str = ""  # empty until the end; then stop, length, repetition, abort, error or refused
    waited_s: float = 0.0  # time in the waiting room, before the first placement
    response_id: str = ""  # the `id` in the client's response
    trace: TraceContext = field(default_factory=begin)
    http: HttpTimes = field(default_factory=HttpTimes)
    taken: float = 0.0  # time.monotonic: received from the front end
    charged: float = 0.0  # time.monotonic: charged to its tenant; the wait for room begins
    timings: Timings = field(default_factory=Timings)  # the current attempt
    before: deque[Timings] = field(default_factory=lambda: deque(maxlen=KEPT))  # earlier attempts
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT))
    spent_before: Spent = field(default_factory=Spent)  # cost of the earlier attempts
    arrived: float = field(default_factory=time.monotonic)  # its body was complete
    first_token: float = 0.0  # time.monotonic: the first token went to the front end
    ended: float = 0.0  # time.monotonic: it has its outcome

    @property
    def budget(self) -> int:
        return min(self.max_tokens, self.max_model_len - self.prompt_tokens)

    @property
    def complete(self) -> bool:
        return len(self.tokens) >= self.budget

    @property
    def began_with(self) -> str:
        """The fingerprint of the weights that must be used to resume it; empty before the first token."""
        return self.model_fingerprint if self.tokens else ""

    @property
    def over(self) -> bool:
        return bool(self.outcome)

    @property
    def tokens_to_prefill(self) -> int:
        """The number of tokens that an engine without the request's KV must prefill."""
        return self.prompt_tokens + len(self.tokens)

    @property
    def tokens_to_generate(self) -> int:
        return max(0, self.budget - len(self.tokens))

    @property
    def journal_bytes(self) -> int:
        """The upper bound, in bytes, on its memory with `room_tokens` output tokens, without images."""
        known = len(self.engine_request) + KEY_BYTES * len(self.prefix.keys)
        asked = LOGPROB_BYTES * self.prompt_logprobs
        each = TOKEN_BYTES + LOGPROB_BYTES * self.logprobs
        return REQUEST_BYTES + known + asked + each * max(0, min(self.room_tokens, self.budget))

    @property
    def outgrown(self) -> bool:
        """Whether it has more output tokens than `room_tokens`."""
        return len(self.tokens) > self.room_tokens

    @property
    def mean_gap_s(self) -> float | None:
        """The mean time between the tokens of the answer; None if there are fewer than two."""
        gaps = len(self.tokens) - 1
        if not self.first_token or gaps < 1:
            return None
        return max(0.0, self.timings.last_token - self.first_token) / gaps

    @property
    def service_message(self) -> worker_pb2.ServiceClass:
        service = self.service
        return worker_pb2.ServiceClass(
            priority=service.priority,
            patience_ms=round(1e3 * service.patience_s),
            share=service.share,
            itl_s=service.itl_s or 0.0,
            preemptible=service.preemptible,
            ttft_s=service.ttft_s or 0.0,
        )

    def start(self, phase: worker_pb2.Phase, **more: Any) -> worker_pb2.Start:
        """Return the message that begins a phase on a worker. `more`: the fields in which phases differ."""
        left_s = max(0.001, self.deadline - time.monotonic())
        return worker_pb2.Start(phase=phase, traceparent=self.trace.traceparent, left_s=left_s, **more)

    @property
    def attempts_kept(self) -> tuple[Timings, ...]:
        """Up to `KEPT` earlier attempts in order, then the current one."""
        return (*self.before, self.timings) if self.attempts else ()

    @property
    def spent(self) -> Spent:
        return self.spent_before + self.timings.spent()

    def placed(self, placement: Placement, asked: float) -> None:
        """Begin another attempt; its placement was requested at `asked`."""
        if self.attempts:
            self.before.append(self.timings)
        self.attempts += 1
        self.spent_before = self.spent
        self.timings = Timings(
            number=self.attempts,
            tokens_before=len(self.tokens),
            asked=asked,
            placed=time.monotonic(),
            scheduler=Process("baton-scheduler", placement.scheduler),
            scheduler_s=placement.scheduler_s,
            prefiller=process_of(placement.prefill or placement.decode),
            decoder=process_of(placement.decode),
        )

    def failed(self, failure: Failure) -> None:
        now = self.timings.ended = time.monotonic()
        cause = {"trouble": failure.trouble.value, "worker": failure.worker_id, "message": failure.message}
        self.events.append(Event("failed", now, self.attempts, cause))

    def goes_without(self, trouble: Trouble) -> None:
        """Continue the attempt without a prefix or embeddings that did not arrive from another worker."""
        self.timings.ended = self.timings.encoded = 0.0
        self.timings.images = 0
        self._goes_on(f"without {trouble.value}", time.monotonic(), self.timings.prefiller)

    def recomputes(self, alone: scheduler_pb2.Worker | None = None) -> None:
        """Continue the attempt on the decode worker, which then also prefills the prompt.

        If `alone` is given, continue it on that worker instead, with no other request in the engine.
        """
        timings = self.timings
        timings.recomputed = time.monotonic()
        timings.ended = 0.0
        if alone is not None:
            timings.decoder = process_of(alone)
        if not timings.first_token:
            timings.prefiller = timings.decoder
        self._goes_on("alone" if alone is not None else "recomputed", timings.recomputed, timings.decoder)

    def _goes_on(self, how: str, at: float, process: Process) -> None:
        cause = {"worker": process.instance, "tokens": self.tokens_to_prefill}
        self.events.append(Event(how, at, self.attempts, cause))

    def taken_by(self, worker_id: str, *, prefills: bool, decodes: bool) -> None:
        for workers, takes_part in ((self.prefill_workers, prefills), (self.decode_workers, decodes)):
            if takes_part and worker_id not in workers:
                workers.append(worker_id)


def journal_bytes(processes: int) -> int:
    """Return the size of a process's journal: with all processes', a 64th of the machine's memory."""
    return max(JOURNAL_BYTES, memory()[0] // 64) // processes


class Journal:
    """The bytes reserved for waiting and running requests; a reservation grows with its request's output.

    New requests are admitted up to the limit. Running ones may grow to `GROWTH` times the limit; a request
    that would exceed that is ended with an error. Not thread-safe.
    """

    def __init__(self, limit: int = JOURNAL_BYTES, images: ImageBudget | None = None) -> None:
        """limit: the maximum size of all entries without images, in bytes."""
        self.limit = limit
        self.size = 0  # bytes of all entries, without images
        self.images = images if images is not None else ImageBudget()
        self._entries: dict[str, int] = {}  # request id -> bytes

    def __len__(self) -> int:
        return len(self._entries)

    def check(self, state: RequestState) -> None:
        """Check that there is room for a request.

        Raises NotAdmitted: 503, or 400 if its text exceeds the whole limit.
        """
        wanted = state.journal_bytes
        if wanted > self.limit:
            raise NotAdmitted(
                f"the request takes {wanted} bytes, more than the router's journal has for all requests "
                f"({self.limit}): shorten the prompt",
                Why.TOO_LARGE,
            )
        self.check_room(wanted)
        self.images.check(state.images, state.party.holder)

    def enter(self, state: RequestState) -> None:
        """Reserve a request's memory. Raises like `check`."""
        self.check(state)
        self.leave(state)
        self.images.enter(state.images, state.party.holder)
        self._entries[state.request_id] = state.journal_bytes
        self.size += state.journal_bytes

    def check_room(self, wanted: int = REQUEST_BYTES) -> None:
        """Check that `wanted` bytes, by default a request's minimum, are free. Raises NotAdmitted (503)."""
        if self.size + wanted > self.limit:
            raise NotAdmitted(
                f"the router's journal is full, with {len(self._entries)} requests",
                Why.JOURNAL,
                _RETRY_AFTER_S,
            )

    def grow(self, state: RequestState) -> None:
        """Reserve memory for a request's next output tokens. Raises Overloaded if there is none."""
        if state.request_id not in self._entries:
            return  # the request has ended
        state.room_tokens = len(state.tokens) + ROOM_TOKENS
        more = state.journal_bytes - self._entries[state.request_id]
        if self.size + more > GROWTH * self.limit:
            raise Overloaded(
                f"the router's journal has no room for {len(state.tokens)} output tokens besides "
                f"{len(self._entries) - 1} other requests",
                _RETRY_AFTER_S,
            )
        self._entries[state.request_id] += more
        self.size += more

    def leave(self, state: RequestState) -> None:
        """Release a request's memory. Idempotent."""
        if state.request_id in self._entries:
            self.size -= self._entries.pop(state.request_id)
            self.images.leave(state.images, state.party.holder)
