"""Timestamps of a request, from which all its durations are derived.

They are the router's time.monotonic, in seconds; 0 if unknown. Workers' timestamps come with their messages
and are converted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from baton.enums import role_name
from baton.protos import scheduler_pb2, worker_pb2


class Process(NamedTuple):
    """One process of the deployment, as named in traces."""

    service: str  # baton-router, baton-scheduler, or baton- and a worker's role
    instance: str  # a worker's id or a scheduler's address; empty for this router


ROUTER = Process("baton-router", "")
UNKNOWN = Process("", "")


def process_of(worker: scheduler_pb2.Worker) -> Process:
    return Process(f"baton-{role_name(worker.role)}", worker.worker_id)


@dataclass(slots=True)
class HttpTimes:
    """The timestamps of one HTTP exchange, shared by all its sequences."""

    arrived: float = field(default_factory=time.monotonic)  # the request's first line arrived
    admitted: float = 0.0  # its tenant's limits let it in
    received: float = 0.0  # its body was complete
    first_byte: float = 0.0  # when the body's first byte was written to the client's socket
    ended: float = 0.0
    status: int = 0  # 0: no response was sent
    streams: bool = False  # the response is an event stream
    paused_s: float = 0.0  # total time spent waiting for the client to read


class Event(NamedTuple):
    """A failure of a request, or what followed it."""

    name: str
    at: float
    attempt: int
    attributes: dict[str, Any]


@dataclass(slots=True)
class Timings:
    number: int = 0  # 1 for the first attempt
    tokens_before: int = 0  # output tokens of earlier attempts
    asked: float = 0.0  # the scheduler was asked for a placement
    placed: float = 0.0
    prefix_asked: float = 0.0  # a source was asked for the prompt's first blocks
    prefix_saved: float = 0.0  # the source answered
    encoded: float = 0.0  # encode workers had the embeddings of the last image
    images: int = 0  # images that encode workers computed or had
    encoder: Process = UNKNOWN  # the worker that had the last image
    queued: float = 0.0  # the prefilling engine queued the request
    prefix_loaded: float = 0.0  # that engine loaded the first blocks
    prefill_began: float = 0.0  # the prefill's first step
    prefill_ended: float = 0.0  # the engine emitted the first token
    first_token: float = 0.0  # the first token arrived here
    held: bool = False  # the first token was held back until the decode worker had a slot
    saved: float = 0.0  # the KV was saved for the decode worker
    admitted: float = 0.0  # the decode worker loaded the KV
    resumed: float = 0.0  # the decode worker's first token arrived here
    last_token: float = 0.0  # the last token arrived here
    recomputed: float = 0.0  # the decode worker was told to prefill the prompt itself
    ended: float = 0.0  # the attempt failed
    scheduler: Process = UNKNOWN
    scheduler_s: float = 0.0  # the scheduler's share of the placement time
    prefiller: Process = UNKNOWN
    decoder: Process = UNKNOWN
    chunks: int = 0  # prefill steps, if the KV was saved
    save_ms: float = 0.0
    handoff: worker_pb2.Admitted | None = None  # the cost of loading the KV
    prefix: worker_pb2.Admitted | None = None  # the cost of loading the prompt's first blocks
    drafts: Any = None  # vLLM's RequestSpecDecodeMetrics, cumulative over the attempt

    def spent(self) -> Spent:
        drafted = self.drafts.num_draft_tokens if self.drafts is not None else 0
        histogram = self.drafts.histogram if self.drafts is not None else []  # [j]: steps with j accepted
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
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    handoff_ms: float = 0.0
    decode_ms: float = 0.0
    draft_steps: int = 0  # steps that verified a draft
    drafted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()  # accepted tokens by their position in the draft

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


def _ms(begin: float, end: float) -> float:
    return max(0.0, 1e3 * (end - begin)) if begin and end else 0.0
