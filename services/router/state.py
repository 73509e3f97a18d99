"""What a router knows of one request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol


class TokenOutput(Protocol):
    """What the relay reads and writes of an engine's output for one request (vLLM's EngineCoreOutput)."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any  # None while it goes on; its str() is stop, length, abort, error or repetition
    stop_reason: int | str | None
    events: list[Any] | None
    new_prompt_logprobs_tensors: Any
    spec_decode_metrics: Any


@dataclass(slots=True)
class Timings:
    """When what happened in the current attempt; time.monotonic, seconds; 0 where it has not."""

    placed: float = 0.0
    prefill_began: float = 0.0
    first_token: float = 0.0
    admitted: float = 0.0
    last_token: float = 0.0
    handoff_bytes: int = 0
    transport: str = ""
    draft_steps: int = 0  # that verified a draft
    drafted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()  # drafted tokens that were accepted


@dataclass(slots=True)
class RequestState:
    """One request, over all of its attempts.

    Invariants: `tokens` only grows, and every token in it was handed to the front end exactly once. `epoch`
    only grows, and no two Starts of one phase carry the same one. `len(tokens) <= budget`. Once `outcome` is
    set nothing changes any more.
    """

    request_id: str  # on the wire: what workers and scheduler call it
    frontend_id: str  # what the front end calls it
    engine_request: bytes  # the original prompt and sampling parameters, the same in every attempt
    prompt_tokens: int
    max_tokens: int  # of output, as asked for
    max_model_len: int
    deadline: float  # time.monotonic, seconds
    prefix_hashes: tuple[bytes, ...] = ()
    tokens: list[int] = field(default_factory=list)
    epoch: int = 0
    attempts: int = 0  # placements tried
    excluded: set[str] = field(default_factory=set)  # workers that failed it
    read_by: str = ""  # the worker of the last attempt that read the prompt
    written_by: str = ""  # and the one that writes the answer
    method: str = ""  # by which that one drafts
    outcome: str = ""  # stop, length, repetition, abort or error once it is over
    timings: Timings = field(default_factory=Timings)
    arrived: float = field(default_factory=time.monotonic)

    @property
    def budget(self) -> int:
        """The most output tokens that there can be."""
        return min(self.max_tokens, self.max_model_len - self.prompt_tokens)

    @property
    def complete(self) -> bool:
        """No further token may be written: an engine must not be asked for one."""
        return len(self.tokens) >= self.budget

    @property
    def over(self) -> bool:
        return bool(self.outcome)

    @property
    def tokens_to_read(self) -> int:
        """What an engine without any of its KV has to compute."""
        return self.prompt_tokens + len(self.tokens)

    @property
    def tokens_to_write(self) -> int:
        return max(0, self.budget - len(self.tokens))

    def placed(self) -> None:
        """Another attempt begins."""
        self.attempts += 1
        self.read_by = self.written_by = ""
        self.timings = Timings(placed=time.monotonic())
