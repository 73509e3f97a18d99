"""`usage.baton`: what one answer took, for a client that asks; and the same as a line in the router's log.

A client asks with a field of the request, in the `openai` package `extra_body={"baton": {"usage": True}}`.
The figures come where OpenAI's usage comes: in the answer, or in a stream's last chunk where `stream_options`
asks for that (`include_usage`). Nothing of it reaches a worker, and without it no byte of an answer differs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.services.router.errors import Unsupported
from baton.services.router.state import RequestState, Spent

FIELD = "baton"
_MARK = b'"baton"'
_LAST_CHUNK = b'"choices":[]'
_EVENT = b"data: "

log = logging.getLogger("baton.requests")  # its level is router.log_level


class UsageOptions(BaseModel):
    """The request's field `baton`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    usage: bool = Field(False, description="Add `usage.baton` to the answer.")


class Usage(BaseModel):
    """What an answer took. Of several sequences (n, several prompts): counts are sums, durations the longest.

    Where a worker failed under it, counts and durations are sums over all attempts, as far as the lost ones
    were heard of.
    """

    method: str | None = Field(description="Who drafted; null without speculation.")
    draft_steps: int = Field(description="Steps that verified a draft.")
    drafted_tokens: int
    accepted_tokens: int = Field(description="Of the drafted ones.")
    mean_accepted_length: float | None = Field(
        description="Tokens written in a step with a draft: the accepted ones and one more; null without."
    )
    acceptance_by_position: list[float] = Field(
        description="Share of the draft steps in which the token drafted at this position was accepted."
    )
    prefill_worker: str | None = Field(description="Who read the prompt.")
    decode_worker: str | None = Field(
        description="Who wrote the answer from its second token on, if it has one."
    )
    attempts: int = Field(description="Placements tried.")
    waiting_ms: float = Field(description="In the router, until there was room on the workers.")
    queue_ms: float = Field(description="From the placement to the prompt's first step.")
    prefill_ms: float = Field(description="From the placement to the first token, the queue included.")
    handoff_ms: float = Field(description="From the first token until the decode worker has the KV cache.")
    decode_ms: float = Field(description="From then to the last token.")


def usage_of(states: Iterable[RequestState]) -> Usage:
    """The figures of one answer's sequences, at least one."""
    states = list(states)
    each = [state.spent for state in states]
    drafts = sum(each, Spent())
    steps, at_position = drafts.draft_steps, drafts.accepted_by_position
    accepted = sum(at_position)
    return Usage(
        method=_names(state.method for state in states),
        draft_steps=steps,
        drafted_tokens=drafts.drafted_tokens,
        accepted_tokens=accepted,
        mean_accepted_length=round(1 + accepted / steps, 4) if steps else None,
        acceptance_by_position=[round(count / steps, 4) for count in at_position] if steps else [],
        prefill_worker=_names(worker for state in states for worker in state.prefill_workers),
        decode_worker=_names(worker for state in states for worker in state.decode_workers),
        attempts=max(state.attempts for state in states),
        waiting_ms=max(round(1e3 * state.waited_s, 3) for state in states),
        queue_ms=max(round(spent.queue_ms, 3) for spent in each),
        prefill_ms=max(round(spent.prefill_ms, 3) for spent in each),
        handoff_ms=max(round(spent.handoff_ms, 3) for spent in each),
        decode_ms=max(round(spent.decode_ms, 3) for spent in each),
    )


def _names(values: Iterable[str]) -> str | None:
    """Usually one; where sequences or attempts went to different workers, all, with commas, in this order."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or None


def log_request(state: RequestState) -> None:
    """One line a sequence that is over."""
    if log.isEnabledFor(logging.INFO):
        counts = {"prompt_tokens": state.prompt_tokens, "output_tokens": len(state.tokens)}
        fields = {"request_id": state.request_id, "outcome": state.outcome, **counts}
        log.info("request", extra={**fields, **usage_of([state]).model_dump()})


def options_in(body: bytes) -> UsageOptions:
    """What a request asks of us. Raises Unsupported (400) for a field `baton` that says something else."""
    if _MARK not in body:
        return UsageOptions()
    try:
        request = json.loads(body)
    except ValueError:
        return UsageOptions()  # the front end's own check answers it
    if not isinstance(request, dict) or FIELD not in request:
        return UsageOptions()
    try:
        return UsageOptions.model_validate(request[FIELD])
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join([FIELD, *map(str, problem["loc"])])
        raise Unsupported(f'{where}: {problem["msg"]}; allowed is {{"usage": true}} or false') from None


def added_to(body: bytes, states: list[RequestState]) -> bytes:
    """A whole answer with `usage.baton`; anything else, as an error, stays as it is."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body
    return _dump(answer) if _add(answer, states) else body


def added_to_event(body: bytes, states: list[RequestState]) -> bytes:
    """A piece of an event stream; the last chunk, which has the whole usage, gets `usage.baton`."""
    if _LAST_CHUNK not in body:
        return body
    events = body.split(b"\n\n")
    for index, event in enumerate(events):
        if event.startswith(_EVENT) and _LAST_CHUNK in event:
            chunk = json.loads(event.removeprefix(_EVENT))
            if _add(chunk, states):
                events[index] = _EVENT + _dump(chunk)
    return b"\n\n".join(events)


def _add(answer: Any, states: list[RequestState]) -> bool:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict) or not states:
        return False
    usage[FIELD] = usage_of(states).model_dump()
    return True


def _dump(answer: Any) -> bytes:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
