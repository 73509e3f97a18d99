"""`usage.baton`: the cost of one response, for clients that ask with `extra_body={"baton": {"usage": True}}`.

It is added to OpenAI's usage: in the response, or in a stream's last chunk with `include_usage`.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from baton.services.router.errors import Unsupported
from baton.services.router.fields import Own
from baton.services.router.record import usage_of
from baton.services.router.state import RequestState

FIELD = "baton"
_LAST_CHUNK = b'"choices":[]'
_EVENT = b"data: "


def wanted(own: Own) -> bool:
    """Return whether a request asks for its usage. Raises Unsupported (400)."""
    if own.baton is msgspec.UNSET or own.baton == {}:
        return False
    match own.baton:
        case {"usage": bool(usage), **others} if not others:
            return usage
    raise Unsupported(f'{FIELD}: {{"usage": true}} or {{"usage": false}} is needed')


def added_to(body: bytes, states: list[RequestState]) -> bytes:
    """Add `usage.baton` to a whole response. Any other body, such as an error, is unchanged."""
    try:
        response = json.loads(body)
    except ValueError:
        return body
    return _dump(response) if _add(response, states) else body


def added_to_event(body: bytes, states: list[RequestState]) -> bytes:
    """Add `usage.baton` to the last chunk, which has the usage, if it is in this piece of a stream."""
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
