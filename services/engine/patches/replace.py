"""Wrap functions of vLLM's in ours; patches replace functions in no other way."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from baton.services.errors import StartError

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]

_WRAPPERS = "_baton_wrappers"  # attribute of our function in the place of vLLM's


def replace(owner: Any, name: str, wrapper: Wrapper, expects: Sequence[str]) -> None:
    """Put `wrapper(original)` in the place of `owner.name`; a second call with this wrapper does nothing.

    owner: a module, a class or an object of vLLM's. expects: the names of the original's parameters in order,
    including `self` and `cls` of a class's. The original stays at `__wrapped__` of its replacement; the last
    wrapper is outermost. Raises StartError, which names the symbol, if vLLM has no such function, or one with
    other parameters.
    """
    original = check(owner, name, expects)
    present = wrappers(owner, name)
    if wrapper in present:
        return
    replacement = functools.wraps(original)(wrapper(original))
    setattr(replacement, _WRAPPERS, (*present, wrapper))
    kind = type(inspect.getattr_static(owner, name))
    setattr(owner, name, kind(replacement) if kind in (classmethod, staticmethod) else replacement)


def check(owner: Any, name: str, expects: Sequence[str]) -> Function:
    """Return the function `owner.name`. Raises StartError unless it takes the parameters `expects`."""
    found = inspect.getattr_static(owner, name, None)
    function: Function | None = (
        found.__func__ if isinstance(found, classmethod) else getattr(owner, name, None)
    )
    if function is None or _parameters_of(function) != tuple(expects):
        raise StartError(
            f"this vLLM has no {_symbol(owner, name)}({', '.join(expects)}): "
            "install the vLLM version that this Baton is made for"
        )
    return function


def wrappers(owner: Any, name: str) -> tuple[Wrapper, ...]:
    """Return the wrappers around `owner.name`, innermost first; () for vLLM's own function."""
    present: tuple[Wrapper, ...] = getattr(getattr(owner, name), _WRAPPERS, ())
    return present


def _parameters_of(function: Function) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # a C++ function: its docstring, made by pybind11, begins with the first overload
        first = re.search(r"^1\. \w+\((.*)\) ->", function.__doc__ or "", re.MULTILINE)
        return tuple(re.findall(r"(\w+): ", first[1])) if first else ()


def _symbol(owner: Any, name: str) -> str:
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}.{name}"
