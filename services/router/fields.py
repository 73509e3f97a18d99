"""Read the fields of a request that the router itself needs, and choose the request's class.

A client chooses with the header `X-Baton-Class`, the body's `service_tier` (OpenAI's) or its `priority`
(vLLM's; 0 chooses none), in this order of precedence. Its key must allow the class.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

import msgspec

from baton.services.classes import Classes, ServiceClass
from baton.services.router.errors import NotAllowed, Unsupported
from baton.services.tenants.model import Caller

HEADER = b"x-baton-class"
# OpenAI's tiers that choose a class. Other tiers, and Anthropic's `standard_only`, get the key's default;
# unknown ones are refused.
_TIERS = {"flex": "batch", "priority": "interactive"}
_NO_CHOICE = ("auto", "default", "scale", "standard_only", None)


class Own(msgspec.Struct):
    """The router's fields, not yet type-checked."""

    model: Any = None
    service_tier: Any = None
    priority: Any = None
    baton: Any = msgspec.UNSET  # null is an error, absence is not


NOTHING = Own()
_decoder = msgspec.json.Decoder(Own)


def own_fields(body: bytes) -> Own:
    """Return the router's fields in a body; the defaults if the body is malformed: vLLM will refuse it."""
    if not body:
        return NOTHING
    try:
        return _decoder.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NOTHING


def by_header(
    classes: Classes, caller: Caller, headers: Iterable[tuple[bytes, bytes]]
) -> ServiceClass | None:
    """Return the class that the header names, or None. Raises Unsupported and NotAllowed."""
    for name, value in headers:
        if name == HEADER:
            return _allowed(classes, caller, value.decode("latin-1").strip(), HEADER.decode())
    return None


def by_body(classes: Classes, caller: Caller, own: Own) -> ServiceClass | None:
    """Return the class that the body asks for, or None. Raises Unsupported and NotAllowed."""
    tier, priority = own.service_tier, own.priority
    if tier not in _NO_CHOICE:
        if not isinstance(tier, str) or tier not in _TIERS:
            known = ", ".join(["auto", "default", *_TIERS])
            raise Unsupported(f"service_tier: {tier!r} is not known; use one of {known}")
        return _allowed(classes, caller, _TIERS[tier], f"service_tier {tier!r}")
    if not isinstance(priority, int) or isinstance(priority, bool) or priority == 0:
        return None  # the front end refuses a priority that is not a number
    mine = [one for one in classes if caller.may_use(one.name)]
    behind = [one for one in mine if one.priority <= priority]
    return behind[-1] if behind else mine[0] if mine else None


def by_default(classes: Classes, caller: Caller) -> ServiceClass:
    """Return the class of a request that asks for none. Raises Unsupported and NotAllowed."""
    if name := caller.default_class:
        return _allowed(classes, caller, name, "the default class of this API key")
    standard = classes.get("interactive")
    if standard is not None and caller.may_use(standard.name):
        return standard
    for one in classes:
        if caller.may_use(one.name):
            return one
    raise NotAllowed("this API key may use no class of requests that is configured here")


def _allowed(classes: Classes, caller: Caller, name: str, where: str) -> ServiceClass:
    mine = [one.name for one in classes if caller.may_use(one.name)]
    found = classes.get(name)
    if found is None:
        raise Unsupported(f"{where}: there is no class {name!r}; this API key may use {', '.join(mine)}")
    if not caller.may_use(name):
        raise NotAllowed(f"{where}: this API key may not use class {name!r}, but {', '.join(mine) or 'none'}")
    return found
