"""`usage.baton`: the cost of one response, for clients that request it, and a line in the router's log.

A client requests it by a field, in the `openai` package `extra_body={"baton": {"usage": True}}`. The figures
are where OpenAI's usage is: in the response, or in a stream's last chunk with the option `include_usage` of
`stream_options`. The field does not reach a worker, and without it no byte of a response differs.
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

    usage: bool = Field(False, description="Add `usage.baton` to the response.")


class Usage(BaseModel):
    """The cost of a response. Over several sequences (n, several prompts): sums of counts, longest durations.

    Where workers failed under it, counts and durations are sums over all attempts, as far as the lost workers
    had reported them.
    """

    method: str | None = Field(description="Speculative method; null without speculation.")
    draft_steps: int = Field(description="Steps that verified a draft.")
    drafted_tokens: int = Field(description="Tokens drafted.")
    accepted_tokens: int = Field(description="Drafted tokens that were accepted.")
    mean_accepted_length: float | None = Field(
        description="Tokens generated per step with a draft: the accepted ones and one more; null without."
    )
    acceptance_by_position: list[float] = Field(
        description="Share of the draft steps in which the token drafted at this position was accepted."
    )
    prefill_worker: str | None = Field(description="Worker that prefilled the prompt.")
    decode_worker: str | None = Field(
        description="Worker that decoded from the second token on, if there is one."
    )
    attempts: int = Field(description="Placements tried.")
    waiting_ms: float = Field(description="In the router, until there was room on the workers.")
    queue_ms: float = Field(description="From the placement to the prefill's first step.")
    prefill_ms: float = Field(description="From the placement to the first token, the queue included.")
    handoff_ms: float = Field(description="From the first token until the decode worker has the KV cache.")
    decode_ms: float = Field(description="From then to the last token.")


def usage_of(states: Iterable[RequestState]) -> Usage:
    """Return the figures of one response's sequences, at least one."""
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
    """Join the distinct values in order: usually one, several where sequences or attempts went apart."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or None


def log_request(state: RequestState) -> None:
    """Log one line for a sequence that is over."""
    if log.isEnabledFor(logging.INFO):
        counts = {"prompt_tokens": state.prompt_tokens, "output_tokens": len(state.tokens)}
        fields = {"request_id": state.request_id, "outcome": state.outcome, **counts}
        log.info("request", extra={**fields, **usage_of([state]).model_dump()})


def options_in(body: bytes) -> UsageOptions:
    """Return the options in a request's body. Raises Unsupported (400) for an unknown one."""
    if _MARK not in body:
        return UsageOptions()
    try:
        request = json.loads(body)
    except ValueError:
        return UsageOptions()  # the front end's own check refuses it
    if not isinstance(request, dict) or FIELD not in request:
        return UsageOptions()
    try:
        return UsageOptions.model_validate(request[FIELD])
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join([FIELD, *map(str, problem["loc"])])
        raise Unsupported(f'{where}: {problem["msg"]}; allowed is {{"usage": true}} or false') from None


def added_to(body: bytes, states: list[RequestState]) -> bytes:
    """Return a whole response with `usage.baton` added; any other body, as an error's, unchanged."""
    try:
        response = json.loads(body)
    except ValueError:
        return body
    return _dump(response) if _add(response, states) else body


def added_to_event(body: bytes, states: list[RequestState]) -> bytes:
    """Return a piece of an event stream, with `usage.baton` added to the last chunk, which has the usage."""
    if _LAST_CHUNK not in body:
        return body
    events = body.split(b"\n\n")
    for index, event in enumerate(events):
        if event.startswith(_EVENT) and _LAST_CHUNK in event:
            chunk = json.loads(event.removeprefix(_EVENT))
            if _add(chunk, states):
                events[index] = _EVENT + _dump(chunk)
    return b"\n\n".join(events)


def _add(response: Any, states: list[RequestState]) -> bool:
    usage = response.get("usage") if isinstance(response, dict) else None
    if not isinstance(usage, dict) or not states:
        return False
    usage[FIELD] = usage_of(states).model_dump()
    return True


def _dump(response: Any) -> bytes:
    return json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode()
