"""Read a request's whole body, within its budget, before any handler sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Message, Receive

from baton.services.router.errors import RequestFailed, Unsupported
from baton.services.router.http.budget import Budget

PIECE = 64 << 10  # bytes counted before other tasks get a turn


async def read(receive: Receive) -> bytes | None:
    """Return a request's body, or None if the client leaves.

    Raises TooLarge or Unsupported, but only once the whole body has arrived: clients do not read a response
    before they have sent everything. Bytes after the mistake are discarded.
    """
    budget = Budget()
    pieces: list[bytes] = []
    problem: RequestFailed | None = None
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        if problem is None and (body := message.get("body", b"")):
            pieces.append(body)
            try:
                await _count(budget, body)
            except RequestFailed as error:
                problem = error
                pieces.clear()
        if not message.get("more_body", False):
            break
    if problem is not None:
        raise problem
    whole = b"".join(pieces)
    budget.finish(whole)
    if budget.lone_surrogates:
        raise Unsupported(
            f"{lone_surrogate(whole)}: an unpaired surrogate, as in text that was cut inside a character"
        )
    return whole


async def _count(budget: Budget, body: bytes) -> None:
    if len(body) <= PIECE:
        budget.take(body)
        return
    for at in range(0, len(body), PIECE):
        budget.take(body[at : at + PIECE])
        await asyncio.sleep(0)


def lone_surrogate(body: bytes) -> str:
    """Return the path of the first text with an unpaired surrogate, such as `messages[0].content`."""
    try:
        found = _surrogate_in(json.loads(body))
    except (ValueError, RecursionError):
        found = None
    return found.removeprefix(".") if found else "the body"


def _surrogate_in(value: Any) -> str | None:
    if isinstance(value, str):
        return "" if _is_broken(value) else None
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = ((f".{name}", one, name) for name, one in value.items())
    elif isinstance(value, list):
        pairs = ((f"[{number}]", one, "") for number, one in enumerate(value))
    for place, one, name in pairs:
        if _is_broken(name):
            return " (a name of a field)"
        if (within := _surrogate_in(one)) is not None:
            return f"{place}{within}"
    return None


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields a body already read, then the messages after it."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def given() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        message, first = first, None
        return message

    return given
