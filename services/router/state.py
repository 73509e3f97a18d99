"""Hold a router's state of one request."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.prefix_keys import NO_KEYS, PromptKeys
from baton.protos import scheduler_pb2
from baton.scheduler.client import Placement
from baton.scheduler.need import Adapter
from baton.services.classes import STANDARD, ServiceClass
from baton.services.router.recovery import Failure, Suspicion, Toll
from baton.services.router.timings import Event, HttpTimes, Process, Spent, Timings, process_of
from baton.services.trace_context import TraceContext, begin

TOKEN_BYTES = 5  # journal size; array("I") has 4 a token, and grows by an eighth at a time
REQUEST_BYTES = 4096  # journal size of the objects around a request's bytes and tokens
KEY_BYTES = 40  # journal size of the name of a block of the prompt
LOGPROB_BYTES = 400  # journal size of a log-probability in vLLM's front end
ROOM_TOKENS = 256  # step in which a request's room in the journal grows
# Attempts, and events, whose moments are kept: a request that loses its worker again and again, with progress
# in between, has no bound of its own.
KEPT = 16


class Party(NamedTuple):
    """The sender of a request, for taking turns when requests wait."""

    tenant: str = ""
    client: str = ""  # the tenant's client
    weight: int = 1  # turns of the tenant for each turn of one with weight 1

    @property
    def number(self) -> int:
        """Return a number that identifies the sender to workers, and reveals nothing else."""
        named = f"{self.tenant}\0{self.client}".encode(errors="surrogatepass")
        return int.from_bytes(hashlib.sha256(named).digest()[:8], "big")


NOBODY = Party()


@dataclass(slots=True)
class RequestState:
    """One request, over all of its attempts, with everything that any worker needs to resume it.

    Invariants: `tokens` only grows, and every token in it was handed to the front end exactly once. `epoch`
    only grows, and no two Starts of one phase carry the same one. `len(tokens) <= budget`. Its memory stays
    below `journal_bytes` as long as its tokens are at most `room_tokens`. Nothing changes once `outcome` is
    set.
    """

    request_id: str  # its id on the wire, for workers and scheduler
    frontend_id: str  # its id at the front end
    engine_request: bytes  # the original prompt and sampling parameters, the same in every attempt
    prompt_tokens: int
    max_tokens: int  # output tokens asked for
    max_model_len: int
    deadline: float  # time.monotonic, seconds
    logprobs: int = 0  # number kept with each output token
    prompt_logprobs: int = 0  # number kept for the whole prompt
    room_tokens: int = ROOM_TOKENS  # output tokens for which the journal has room
    party: Party = NOBODY
    service: ServiceClass = STANDARD
    prefix: PromptKeys = NO_KEYS
    model: str = ""  # the name under which it is served
    adapter: Adapter | None = None  # LoRA's
    tokens: array[int] = field(default_factory=lambda: array("I"))
    epoch: int = 0
    attempts: int = 0  # placements tried
    failures: Toll = field(default_factory=Toll)  # workers that failed it without much progress
    suspicion: Suspicion = field(default_factory=Suspicion)
    excluded: set[str] = field(default_factory=set)  # workers that failed it
    prefill_workers: list[str] = field(default_factory=list)  # workers that were given the prompt, each once
    decode_workers: list[str] = field(default_factory=list)  # workers that were given the decode, each once
    model_fingerprint: str = ""  # weights of the last of these
    method: str = ""  # speculation on the last of these
    outcome: str = ""  # stop, length, repetition, abort, error or refused once it is over
    waited_s: float = 0.0  # time waiting for room before the first placement
    response_id: str = ""  # its id for the client
    trace: TraceContext = field(default_factory=begin)
    http: HttpTimes = field(default_factory=HttpTimes)
    taken: float = 0.0  # time.monotonic: when it came from the front end
    charged: float = 0.0  # time.monotonic: charged to its tenant; from then on it is in the waiting room
    timings: Timings = field(default_factory=Timings)  # the current attempt's
    before: deque[Timings] = field(default_factory=lambda: deque(maxlen=KEPT))  # earlier attempts'
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT))
    spent_before: Spent = field(default_factory=Spent)  # cost of the attempts before it
    arrived: float = field(default_factory=time.monotonic)  # when its whole body had arrived
    first_token: float = 0.0  # time.monotonic: the first token went to the front end
    ended: float = 0.0  # time.monotonic: it has its outcome

    @property
    def budget(self) -> int:
        """The greatest possible number of output tokens."""
        return min(self.max_tokens, self.max_model_len - self.prompt_tokens)

    @property
    def complete(self) -> bool:
        """Whether the budget is used up: an engine must not be asked for another token."""
        return len(self.tokens) >= self.budget

    @property
    def began_with(self) -> str:
        """The fingerprint of the weights that must resume the request; empty before its first token."""
        return self.model_fingerprint if self.tokens else ""

    @property
    def over(self) -> bool:
        return bool(self.outcome)

    @property
    def tokens_to_prefill(self) -> int:
        """The tokens to prefill for an engine that has none of the request's KV."""
        return self.prompt_tokens + len(self.tokens)

    @property
    def tokens_to_generate(self) -> int:
        return max(0, self.budget - len(self.tokens))

    @property
    def journal_bytes(self) -> int:
        """The most memory that the request takes with `room_tokens` output tokens, bytes."""
        known = len(self.engine_request) + KEY_BYTES * len(self.prefix.keys)
        asked = LOGPROB_BYTES * self.prompt_logprobs
        each = TOKEN_BYTES + LOGPROB_BYTES * self.logprobs
        return REQUEST_BYTES + known + asked + each * max(0, min(self.room_tokens, self.budget))

    @property
    def outgrown(self) -> bool:
        """Whether the request has more output tokens than the journal has room for."""
        return len(self.tokens) > self.room_tokens

    @property
    def attempts_kept(self) -> tuple[Timings, ...]:
        """The last attempts in order, as far as their moments are kept; none before the first placement."""
        return (*self.before, self.timings) if self.attempts else ()

    @property
    def spent(self) -> Spent:
        """The cost of all attempts so far."""
        return self.spent_before + self.timings.spent()

    def placed(self, placement: Placement, asked: float) -> None:
        """Begin another attempt, whose placement was requested at `asked`."""
        if self.attempts:
            self.before.append(self.timings)
        self.attempts += 1
        self.spent_before = self.spent
        self._begin(placement, asked)

    def placed_instead(self, placement: Placement) -> None:
        """Change the attempt's placement, before any worker was told of it."""
        self._begin(placement, self.timings.asked)

    def _begin(self, placement: Placement, asked: float) -> None:
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

    def without_prefix(self) -> None:
        """Note that the attempt goes on: its prefill worker computes the prompt from its beginning."""
        self.timings.ended = 0.0
        self._goes_on("without prefix", time.monotonic(), self.timings.prefiller)

    def recomputes(self) -> None:
        """Note that the attempt goes on: its decode worker prefills too."""
        timings = self.timings
        timings.recomputed = time.monotonic()
        timings.ended = 0.0
        if not timings.first_token:
            timings.prefiller = timings.decoder
        self._goes_on("recomputed", timings.recomputed, timings.decoder)

    def goes_alone(self, worker: scheduler_pb2.Worker) -> None:
        timings = self.timings
        timings.recomputed = time.monotonic()
        timings.ended = 0.0
        timings.decoder = process_of(worker)
        if not timings.first_token:
            timings.prefiller = timings.decoder
        self._goes_on("alone", timings.recomputed, timings.decoder)

    def _goes_on(self, how: str, at: float, process: Process) -> None:
        cause = {"worker": process.instance, "tokens": self.tokens_to_prefill}
        self.events.append(Event(how, at, self.attempts, cause))

    def taken_by(self, worker_id: str, *, prefills: bool, decodes: bool) -> None:
        """Note a worker that was given a part of the request."""
        for workers, takes_part in ((self.prefill_workers, prefills), (self.decode_workers, decodes)):
            if takes_part and worker_id not in workers:
                workers.append(worker_id)
