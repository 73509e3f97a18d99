"""A router's state of one request."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

TOKEN_BYTES = 5  # of a journal: array("I") has 4 a token, and grows by an eighth at a time
REQUEST_BYTES = 4096  # of a journal: the objects around a request's bytes and tokens
LOGPROB_BYTES = 400  # of a journal: one log-probability as vLLM's front end keeps it until the request's end
ROOM_TOKENS = 256  # by which a request's room in the journal grows


class Party(NamedTuple):
    """The sender of a request, among those that take turns when requests wait."""

    tenant: str = ""
    client: str = ""  # of the tenant's
    weight: int = 1  # turns of the tenant, where another of weight 1 gets one


NOBODY = Party()


@dataclass(slots=True)
class Timings:
    """The moments of the current attempt, time.monotonic, seconds; 0 before each."""

    placed: float = 0.0
    prefill_began: float = 0.0
    first_token: float = 0.0
    admitted: float = 0.0
    last_token: float = 0.0
    handoff_bytes: int = 0
    transport: str = ""
    drafts: Any = None  # the engine's count of this attempt so far (vLLM's RequestSpecDecodeMetrics)

    def spent(self) -> Spent:
        """Return the attempt's cost so far."""
        drafted = self.drafts.num_draft_tokens if self.drafts is not None else 0
        histogram = self.drafts.histogram if self.drafts is not None else []  # [j]: steps that accepted j
        return Spent(
            queue_ms=_ms(self.placed, self.prefill_began),
            prefill_ms=_ms(self.placed, self.first_token),
            handoff_ms=_ms(self.first_token, self.admitted),
            decode_ms=_ms(self.admitted or self.first_token, self.last_token),
            draft_steps=sum(histogram),
            drafted_tokens=drafted,
            accepted_by_position=tuple(sum(histogram[at:]) for at in range(1, len(histogram))),
        )


@dataclass(frozen=True, slots=True)
class Spent:
    """The cost of one attempt, or the sum over several."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    handoff_ms: float = 0.0
    decode_ms: float = 0.0
    draft_steps: int = 0  # that verified a draft
    drafted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()  # drafted tokens that were accepted

    def __add__(self, other: Spent) -> Spent:
        positions = zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0)
        return Spent(
            self.queue_ms + other.queue_ms,
            self.prefill_ms + other.prefill_ms,
            self.handoff_ms + other.handoff_ms,
            self.decode_ms + other.decode_ms,
            self.draft_steps + other.draft_steps,
            self.drafted_tokens + other.drafted_tokens,
            tuple(one + more for one, more in positions),
        )


@dataclass(slots=True)
class RequestState:
    """One request, over all of its attempts. It holds all that any worker needs to resume it.

    Invariants: `tokens` only grows, and every token in it was handed to the front end exactly once. `epoch`
    only grows, and no two Starts of one phase carry the same one. `len(tokens) <= budget`. Its memory stays
    below `journal_bytes` as long as its tokens are at most `room_tokens`. Nothing changes once `outcome` is
    set.
    """

    request_id: str  # on the wire: what workers and scheduler call it
    frontend_id: str  # what the front end calls it
    engine_request: bytes  # the original prompt and sampling parameters, the same in every attempt
    prompt_tokens: int
    max_tokens: int  # of output, as asked for
    max_model_len: int
    deadline: float  # time.monotonic, seconds
    logprobs: int = 0  # kept with each output token
    prompt_logprobs: int = 0  # kept with each token of the prompt
    room_tokens: int = ROOM_TOKENS  # output tokens for which the journal has room
    party: Party = NOBODY
    prefix_hashes: tuple[bytes, ...] = ()
    tokens: array[int] = field(default_factory=lambda: array("I"))
    epoch: int = 0
    attempts: int = 0  # placements tried
    failures: int = 0  # attempts in a row that a worker had begun, and lost without much progress
    excluded: set[str] = field(default_factory=set)  # workers that failed it
    prefill_workers: list[str] = field(default_factory=list)  # that were given the prompt, each once
    decode_workers: list[str] = field(default_factory=list)  # that were given the decode, each once
    model_fingerprint: str = ""  # of the weights of the last ones
    method: str = ""  # of speculation, on the last of them
    outcome: str = ""  # stop, length, repetition, abort, error or refused once it is over
    waited_s: float = 0.0  # for room, before the first placement
    timings: Timings = field(default_factory=Timings)  # of the current attempt
    spent_before: Spent = field(default_factory=Spent)  # on the attempts before it
    arrived: float = field(default_factory=time.monotonic)
    first_token: float = 0.0  # time.monotonic; of the first attempt that had one

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
        """Whether the request has its outcome."""
        return bool(self.outcome)

    @property
    def tokens_to_prefill(self) -> int:
        """The tokens to prefill for an engine that has none of the request's KV."""
        return self.prompt_tokens + len(self.tokens)

    @property
    def tokens_to_generate(self) -> int:
        """The rest of the budget."""
        return max(0, self.budget - len(self.tokens))

    @property
    def journal_bytes(self) -> int:
        """The most memory that the request takes with `room_tokens` output tokens, bytes."""
        known = len(self.engine_request) + sum(map(len, self.prefix_hashes))
        asked = LOGPROB_BYTES * self.prompt_logprobs * self.prompt_tokens
        each = TOKEN_BYTES + LOGPROB_BYTES * self.logprobs
        return REQUEST_BYTES + known + asked + each * max(0, min(self.room_tokens, self.budget))

    @property
    def outgrown(self) -> bool:
        """Whether the request has more output tokens than the journal has room for."""
        return len(self.tokens) > self.room_tokens

    @property
    def spent(self) -> Spent:
        """The cost of all attempts so far."""
        return self.spent_before + self.timings.spent()

    def placed(self) -> None:
        """Begin another attempt."""
        self.attempts += 1
        self.spent_before = self.spent
        self.timings = Timings(placed=time.monotonic())

    def taken_by(self, worker_id: str, *, prefills: bool, decodes: bool) -> None:
        """Note a worker that was given a part of the request."""
        for workers, takes_part in ((self.prefill_workers, prefills), (self.decode_workers, decodes)):
            if takes_part and worker_id not in workers:
                workers.append(worker_id)


def _ms(begin: float, end: float) -> float:
    return max(0.0, 1e3 * (end - begin)) if begin and end else 0.0
