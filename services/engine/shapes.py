"""Describe a request for the log: the fields it sets, with numbers and lengths but never text or tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

LONGEST = 600  # characters
_QUIET = frozenset(
    {"output_kind", "skip_clone", "stop_token_ids", "all_stop_token_ids"}
)  # fields that only front ends use


def shape_of(request: Any) -> str:
    prompt = len(request.prompt_token_ids or ())
    written = getattr(request, "num_output_tokens", 0)
    fields = ", ".join(_fields(request.sampling_params)) or "no field"
    text = f"prompt of {prompt} tokens, {written} written; sets {fields}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def _fields(params: Any) -> Iterable[str]:
    if params is None:
        return
    default = type(params)()
    for name in type(params).__struct_fields__:
        value = getattr(params, name)
        if (
            name.startswith("_")
            or name in _QUIET
            or value is None
            or value is False
            or value == getattr(default, name)
        ):
            continue
        yield f"{name} ({_measure(value)})"


def _measure(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if dataclasses.is_dataclass(value):
        parts = ((one.name, getattr(value, one.name)) for one in dataclasses.fields(value))
        return ", ".join(f"{name}: {_measure(part)}" for name, part in parts if part)
    try:
        return f"{type(value).__name__} of {len(value)}"
    except TypeError:
        return type(value).__name__
