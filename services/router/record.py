"""Record a finished request for the log, traces and the live page, and compute its usage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from baton.services.router.state import RequestState
from baton.services.router.timeline import Stage, other_stages, seconds_by_stage, to_first_token
from baton.services.router.timings import Event, Spent
from baton.services.trace_context import TraceContext

_FAILED = ("error", "refused")
_AS_IT_IS = (
    *("request_id", "response_id", "tenant", "model", "outcome", "status", "streams"),
    *("prompt_tokens", "output_tokens"),
)


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    number: int
    prefill_worker: str
    decode_worker: str  # the same worker if it did both
    placed_at: float  # seconds since 1970
    trouble: str  # why it failed; "" if it did not


@dataclass(frozen=True, slots=True)
class Record:
    """A finished request. Times of stages and events are time.monotonic; `at_s` converts them."""

    request_id: str  # used in logs, by workers and by the scheduler
    response_id: str  # the `id` in the response
    trace: TraceContext
    tenant: str
    service: str  # the class of the request
    model: str
    outcome: str
    status: int  # 0: no response was sent
    streams: bool
    prompt_tokens: int
    output_tokens: int
    arrived: float
    ended: float
    first_token_s: float  # time to first token; in a stream, to the first byte; 0: no token
    client_s: float  # time spent waiting for the client to read
    clock_s: float  # seconds since 1970 at time.monotonic() == 0
    method: str  # the speculative method
    draft_steps: int
    drafted_tokens: int
    accepted_tokens: int
    retried: bool
    attempts: tuple[AttemptRecord, ...]  # the most recent ones
    to_first_token: tuple[Stage, ...]  # in sequence, without gaps
    later: tuple[Stage, ...]  # later stages, and stages within other stages
    events: tuple[Event, ...]

    @property
    def failed(self) -> bool:
        return self.outcome in _FAILED or self.status >= 500

    @property
    def slowness_s(self) -> float:
        """The time to first token, or the whole duration if there was no token."""
        return self.first_token_s or self.ended - self.arrived

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.to_first_token + self.later

    @property
    def first_token_stages(self) -> Mapping[str, float]:
        """Seconds to the first token by stage; their sum is `slowness_s`."""
        return seconds_by_stage(self.to_first_token)

    def at_s(self, moment: float) -> float:
        return moment + self.clock_s

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values; offsets are milliseconds since the request's arrival."""
        return {
            **{name: getattr(self, name) for name in _AS_IT_IS},
            "trace_id": self.trace.trace_id,
            "class": self.service,
            "arrived_at": round(self.at_s(self.arrived), 3),
            "duration_ms": _ms(self.ended - self.arrived),
            "ttft_ms": _ms(self.first_token_s),
            "client_ms": _ms(self.client_s),
            "drafts": {
                "method": self.method,
                "steps": self.draft_steps,
                "drafted_tokens": self.drafted_tokens,
                "accepted_tokens": self.accepted_tokens,
            },
            "attempts": [asdict(one) for one in self.attempts],
            "stages": [
                {
                    "name": one.name,
                    "at_ms": _ms(one.begin - self.arrived),
                    "ms": _ms(one.seconds),
                    "service": one.process.service,
                    "worker": one.process.instance,
                    "attempt": one.attempt,
                    "within": one.within,
                    "attributes": dict(one.attributes),
                }
                for one in self.stages
            ],
            "events": [
                {
                    "name": one.name,
                    "at_ms": _ms(one.at - self.arrived),
                    "attempt": one.attempt,
                    "attributes": dict(one.attributes),
                }
                for one in self.events
            ],
        }


def record_of(state: RequestState) -> Record:
    """Return the record of a request whose response has been sent."""
    http, spent = state.http, state.spent
    troubles = {one.attempt: one.attributes["trouble"] for one in state.events if one.name == "failed"}
    clock_s = time.time() - time.monotonic()
    first = state.first_token
    if http.streams and first:
        first = max(first, http.first_byte)
    return Record(
        request_id=state.request_id,
        response_id=state.response_id,
        trace=state.trace,
        tenant=state.party.tenant,
        service=state.service.name,
        model=state.model,
        outcome=state.outcome,
        status=http.status,
        streams=http.streams,
        prompt_tokens=state.prompt_tokens,
        output_tokens=len(state.tokens),
        arrived=http.arrived,
        ended=max(state.ended, http.ended),
        first_token_s=max(0.0, first - http.arrived) if first else 0.0,
        client_s=http.paused_s,
        clock_s=clock_s,
        method=state.method,
        draft_steps=spent.draft_steps,
        drafted_tokens=spent.drafted_tokens,
        accepted_tokens=sum(spent.accepted_by_position),
        retried=bool(state.events),
        attempts=tuple(
            AttemptRecord(
                one.number,
                one.prefiller.instance,
                one.decoder.instance,
                round(one.placed + clock_s, 3),
                troubles.get(one.number, ""),
            )
            for one in state.attempts_kept
        ),
        to_first_token=tuple(to_first_token(state)),
        later=tuple(other_stages(state)),
        events=tuple(state.events),
    )


def usage_of(states: Iterable[RequestState]) -> dict[str, Any]:
    """Return the cost of one response for `usage.baton` and the log (docs/observability.md).

    Counts are summed over its sequences; durations are the longest ones. Both include failed attempts, as far
    as their workers reported them.
    """
    states = list(states)
    each = [state.spent for state in states]
    drafts = sum(each, Spent())
    steps, at_position = drafts.draft_steps, drafts.accepted_by_position
    accepted = sum(at_position)
    longest = ("queue_ms", "prefill_ms", "handoff_ms", "decode_ms")
    return {
        "method": _names(state.method for state in states),
        "draft_steps": steps,
        "drafted_tokens": drafts.drafted_tokens,
        "accepted_tokens": accepted,
        "mean_accepted_length": round(1 + accepted / steps, 4) if steps else None,
        "acceptance_by_position": [round(count / steps, 4) for count in at_position] if steps else [],
        "prefill_worker": _names(worker for state in states for worker in state.prefill_workers),
        "decode_worker": _names(worker for state in states for worker in state.decode_workers),
        "attempts": max(state.attempts for state in states),
        "waiting_ms": max(round(1e3 * state.waited_s, 3) for state in states),
        **{name: max(round(getattr(spent, name), 3) for spent in each) for name in longest},
    }


def _names(values: Iterable[str]) -> str | None:
    return ", ".join(dict.fromkeys(value for value in values if value)) or None


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
