"""The fields of a request's body that the router reads itself, found in one pass over all others."""

from __future__ import annotations

import codecs
from typing import Any

import msgspec


class Own(msgspec.Struct):
    """The router's own fields, of whatever type."""

    model: Any = None
    service_tier: Any = None
    priority: Any = None
    baton: Any = msgspec.UNSET  # null is a mistake


NOTHING = Own()
_decoder = msgspec.json.Decoder(Own)


def own_fields(body: bytes) -> Own:
    """Return the router's own fields of a body; none of a body that vLLM's check refuses anyway."""
    if not body:
        return NOTHING
    try:
        return _decoder.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NOTHING
