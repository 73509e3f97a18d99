"""A fake worker's request: its tokens, which follow a formula, and its fault."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, FinishReason

from baton.handoff.reports import Problem
from baton.protos import handoff_pb2, worker_pb2
from baton.services.worker.following import Following
from baton.services.worker.incoming import Event

LEASE_S = 600.0  # how long saved KV and embeddings can be pulled
EOS = 256  # the checkpoint's end token; lower tokens are bytes


def answer(prompt: list[int], count: int, begin: int = 0) -> list[int]:
    """Return output tokens begin .. begin + count for `prompt`: lower-case letters as bytes."""
    return [97 + (sum(prompt) * 7 + index * index) % 26 for index in range(begin, begin + count)]


# A worker refuses with these codes at once, even before the prompt is prefilled.
_REFUSALS = (
    worker_pb2.Failed.CODE_DRAINING,
    worker_pb2.Failed.CODE_FULL,
    worker_pb2.Failed.CODE_INVALID,
    worker_pb2.Failed.CODE_STAGING,
    worker_pb2.Failed.CODE_STALE,
)


@dataclass
class Fault:
    """A fault of one Start. Exactly one of failed, die, end_with, not_kept, silent and hang is set."""

    phase: worker_pb2.Phase
    after_tokens: int = 0  # tokens that this phase generates before the fault
    failed: worker_pb2.Failed.Code | None = None  # reply with Failed
    die: bool = False  # the worker ends and its connections are reset
    end_with: FinishReason | None = None  # the engine ends the request
    not_kept: bool = False  # PREFILL, SAVE: reply with a problem in Saved
    silent: bool = False  # send no further message about this request ...
    loaded: bool = False  # ... except that its KV is loaded,
    crosses: bool = False  # and a token that was in flight when the next Start was sent
    hang: bool = False  # send no further message, but keep the connections open
    images: tuple[str, ...] = ()  # image names in the Failed reply
    goes_on: bool = False  # the engine continues after `failed`
    early: bool = False  # fail while the request is waiting for its source

    @property
    def at_once(self) -> bool:
        """Whether the fault happens before the request's source is complete."""
        return self.early or (self.failed in _REFUSALS and not self.after_tokens)


class _SourceEnd:
    """A listener to a source, which waits for its end."""

    def __init__(self) -> None:
        self.call: asyncio.Task[None] | None = None
        self.came: asyncio.Future[worker_pb2.Complete | Problem] = asyncio.get_running_loop().create_future()
        self.came.add_done_callback(self._leave)

    def on_begun(self, manifest: handoff_pb2.Manifest) -> None:
        """Wait for the end."""

    def on_complete(self, complete: worker_pb2.Complete) -> None:
        if not self.came.done():
            self.came.set_result(complete)

    def on_failed(self, event: Event, problem: Problem) -> None:
        del event
        if not self.came.done():
            self.came.set_result(problem)

    def _leave(self, came: asyncio.Future[worker_pb2.Complete | Problem]) -> None:
        if came.cancelled() and self.call is not None:
            self.call.cancel()


async def source_end(
    following: Following, source: worker_pb2.Source, epoch: int, within_s: float | None = None
) -> worker_pb2.Complete | Problem:
    """Follow an attempt's source to its end."""
    end = _SourceEnd()
    following.follow(end, source, epoch, within_s)
    return await end.came


@dataclass
class Running:
    work: asyncio.Event  # set when its router has work
    start: worker_pb2.Start
    prompt: list[int]
    max_tokens: int
    eos_at: int | None
    generated: int  # output tokens, including those of earlier phases
    fault: Fault | None
    steps: int = 1  # remaining prefill steps
    generated_here: int = 0
    silent: bool = False
    queued: float = field(default_factory=time.monotonic)
    following: asyncio.Task[None] | None = None  # follows its source until that is complete
    loads: worker_pb2.Complete | None = None  # the source's KV
    missing: tuple[worker_pb2.Failed.Code, str] | None = None  # why there is no KV, or no image
    image: str = ""  # ENCODE: its name

    @property
    def ready(self) -> bool:
        waits = self.following is not None and not (self.fault is not None and self.fault.at_once)
        return not self.silent and not waits

    @property
    def needs_it(self) -> bool:
        """Whether the request cannot run without the missing KV or image."""
        no_image = self.missing is not None and self.missing[0] == worker_pb2.Failed.CODE_MEDIA
        return no_image or self.start.phase == worker_pb2.PHASE_DECODE

    def leave(self) -> None:
        if self.following is not None:
            self.following.cancel()

    def next_tokens(self, most: int, script: list[int]) -> list[int]:
        """Return the next output tokens, from the script if there is one, else by the formula."""
        tokens: list[int] = []
        while len(tokens) < most and self.generated + len(tokens) < self.max_tokens:
            place = self.generated + len(tokens)
            if place == (len(script) if script else self.eos_at):
                return [*tokens, EOS]
            tokens.append(script[place] if script else answer(self.prompt, 1, place)[0])
        return tokens

    def manifest(self, worker_id: str) -> handoff_pb2.Manifest:
        return handoff_pb2.Manifest(
            request_id=self.start.request_id,
            epoch=self.start.epoch,
            worker_id=worker_id,
            num_tokens=self.start.prefix_tokens or len(self.prompt),
            lease_s=LEASE_S,
        )

    def events(self, step_s: float) -> list[Any]:
        """Return the events of a first output: queued on arrival, scheduled one step before now."""
        scheduled = max(self.queued, time.monotonic() - step_s)
        return [
            EngineCoreEvent(EngineCoreEventType.QUEUED, self.queued),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, scheduled),
        ]
