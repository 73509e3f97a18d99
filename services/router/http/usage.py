"""`usage.baton`: the cost of one response, for clients that request it.

A client requests it by a field, in the `openai` package `extra_body={"baton": {"usage": True}}`. The figures
are where OpenAI's usage is: in the response, or in a stream's last chunk with the option `include_usage` of
`stream_options`. The field does not reach a worker, and without it no byte of a response differs.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.services.router.errors import Unsupported
from baton.services.router.fields import Own
from baton.services.router.record import usage_of
from baton.services.router.state import RequestState

FIELD = "baton"
_LAST_CHUNK = b'"choices":[]'
_EVENT = b"data: "


class UsageOptions(BaseModel):
    """The request's field `baton`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    usage: bool = Field(False, description="Add `usage.baton` to the response.")


def options_in(own: Own) -> UsageOptions:
    """Return the options in a request's own fields. Raises Unsupported (400) for an unknown option."""
    if own.baton is msgspec.UNSET:
        return UsageOptions()
    try:
        return UsageOptions.model_validate(own.baton)
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
    usage[FIELD] = usage_of(states)
    return True


def _dump(response: Any) -> bytes:
    return json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode()
