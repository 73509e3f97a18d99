"""Read the fields of a request's body that the router itself needs, in one pass."""

from __future__ import annotations

import codecs
from typing import Any

import msgspec


class Own(msgspec.Struct):
    """The router's fields, not yet type-checked."""

    model: Any = None
    service_tier: Any = None
    priority: Any = None
    baton: Any = msgspec.UNSET  # null is an error, absence is not


NOTHING = Own()
_decoder = msgspec.json.Decoder(Own)


def own_fields(body: bytes) -> Own:
    """Return the router's fields in a body; the defaults if it is malformed, as vLLM will refuse it."""
    if not body:
        return NOTHING
    try:
        return _decoder.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NOTHING
