"""One request in a fake worker: its tokens, by a formula, and the fault that it meets."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, FinishReason

from baton.protos import handoff_pb2, worker_pb2

EOS = 256  # of the checkpoint's tokenizer, in which token n is byte n below it


def answer(prompt: list[int], count: int, begin: int = 0) -> list[int]:
    """Return the output tokens begin .. begin + count of `prompt`: small letters, as bytes."""
    return [97 + (sum(prompt) * 7 + index * index) % 26 for index in range(begin, begin + count)]


# With one of these a worker has not begun: it says so at once, also where the prompt is not prefilled yet.
_REFUSALS = (
    worker_pb2.Failed.CODE_DRAINING,
    worker_pb2.Failed.CODE_FULL,
    worker_pb2.Failed.CODE_INVALID,
    worker_pb2.Failed.CODE_STAGING,
    worker_pb2.Failed.CODE_STALE,
)


@dataclass
class Fault:
    """A fault for one Start. Exactly one of the reactions is set."""

    phase: worker_pb2.Phase
    after_tokens: int = 0  # tokens that this phase generates before it
    failed: worker_pb2.Failed.Code | None = None  # reply with Failed
    die: bool = False  # the whole worker is gone, its connections reset
    end_with: FinishReason | None = None  # the engine ends the request by itself
    not_kept: bool = False  # PREFILL, SAVE: Saved with a problem
    silent: bool = False  # this request gets no further message,
    loaded: bool = False  # except that its KV cache is loaded,
    crosses: bool = False  # and but for a token on its way when the next Start was sent
    hang: bool = False  # the worker sends no further message; its connections stay
    goes_on: bool = False  # whether the engine that `failed` goes on
    early: bool = False  # while it waits for its source, and not once that is complete

    @property
    def at_once(self) -> bool:
        """Whether it does not wait for the request's source."""
        return self.early or (self.failed in _REFUSALS and not self.after_tokens)


@dataclass
class Running:
    """One request in the fake engine."""

    work: asyncio.Event  # its router's
    start: worker_pb2.Start
    prompt: list[int]
    max_tokens: int
    eos_at: int | None
    generated: int  # output tokens, those of earlier phases included
    fault: Fault | None
    steps: int = 1  # of its prefill that are left
    generated_here: int = 0
    silent: bool = False
    queued: float = field(default_factory=time.monotonic)
    following: asyncio.Task[None] | None = None  # its source, until that is complete
    loads: worker_pb2.Complete | None = None  # what came of that
    missing: tuple[worker_pb2.Failed.Code, str] | None = None  # or why nothing does

    @property
    def ready(self) -> bool:
        """Whether a step brings it on."""
        waits = self.following is not None and not (self.fault is not None and self.fault.at_once)
        return not self.silent and not waits

    def leave(self) -> None:
        """End what runs for it."""
        if self.following is not None:
            self.following.cancel()

    def next_tokens(self, most: int, script: list[int]) -> list[int]:
        """Return the next output tokens, until it ends: of the script, if there is one, or by the formula."""
        tokens: list[int] = []
        while len(tokens) < most and self.generated + len(tokens) < self.max_tokens:
            place = self.generated + len(tokens)
            if place == (len(script) if script else self.eos_at):
                return [*tokens, EOS]
            tokens.append(script[place] if script else answer(self.prompt, 1, place)[0])
        return tokens

    def manifest(self, worker_id: str) -> handoff_pb2.Manifest:
        """Return what is told of its KV, saved on this worker."""
        return handoff_pb2.Manifest(
            request_id=self.start.request_id,
            epoch=self.start.epoch,
            worker_id=worker_id,
            num_tokens=self.start.prefix_tokens or len(self.prompt),
        )

    def events(self, step_s: float) -> list[Any]:
        """Return the times of a first output: queued when it came, scheduled a step before now."""
        scheduled = max(self.queued, time.monotonic() - step_s)
        return [
            EngineCoreEvent(EngineCoreEventType.QUEUED, self.queued),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, scheduled),
        ]
