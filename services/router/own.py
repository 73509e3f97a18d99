"""Find the fields of a request's body that the router reads itself, in one pass over the body."""

from __future__ import annotations

import codecs
from typing import Any

import msgspec


class Own(msgspec.Struct):
    """The router's own fields, of any type."""

    model: Any = None
    service_tier: Any = None
    priority: Any = None
    baton: Any = msgspec.UNSET  # unlike absence, null is an error


NOTHING = Own()
_decoder = msgspec.json.Decoder(Own)


def own_fields(body: bytes) -> Own:
    """Return the router's own fields in a body; none if vLLM's check will refuse the body anyway."""
    if not body:
        return NOTHING
    try:
        return _decoder.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NOTHING
