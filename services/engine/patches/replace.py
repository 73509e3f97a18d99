"""Wrap vLLM's functions in ours. Patches replace functions in no other way.

A patch's module decorates its functions with `replaces`. Patches of individual objects call `replace`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from baton.services.errors import StartError

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

_WRAPPERS = "_baton_wrappers"  # attribute of a function that replaces vLLM's


@dataclass(frozen=True)
class Replacement:
    """A function of a patch, and the function of vLLM that it replaces."""

    symbol: str  # MODULE:ATTRIBUTE
    ours: Function
    expects: tuple[str, ...]


_replacements: dict[str, list[Replacement]] = {}  # keyed by the patch's module


def replaces(symbol: str, *expects: str) -> Callable[[F], F]:
    """Let `install` replace vLLM's MODULE:ATTRIBUTE with the decorated function. expects: see `replace`."""

    def register(ours: F) -> F:
        _replacements.setdefault(ours.__module__, []).append(Replacement(symbol, ours, expects))
        return ours

    return register


def replacements(module: ModuleType) -> tuple[Replacement, ...]:
    """Return the replacements of a patch's module, in the order of their definition."""
    return tuple(_replacements.get(module.__name__, ()))


def install(module: ModuleType) -> None:
    """Apply a patch once: its replacements, and its own `install`, if any. Raises StartError."""
    for one in replacements(module):
        replace(*located(one.symbol), one.ours, one.expects)
    if hasattr(module, "install"):
        module.install()


def located(symbol: str) -> tuple[Any, str]:
    """Return the module or class that owns a symbol, MODULE:ATTRIBUTE, and the attribute's name."""
    module, _, path = symbol.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def replace(owner: Any, name: str, ours: Function, expects: Sequence[str] = ()) -> None:
    """Call `ours` instead of `owner.name`, with the original function before the call's own arguments.

    owner: a module, class or object. expects: the names of the original's parameters, with `self` and `cls`;
    by default, the parameters of `ours` after the first. The last wrapper is outermost, and a second call
    with the same `ours` does nothing. Raises StartError, which names the symbol, if vLLM's function differs.
    """
    original = check(owner, name, expects or _parameters_of(ours)[1:])
    present = wrappers(owner, name)
    if ours in present:
        return
    replacement = around(original, ours)
    setattr(replacement, _WRAPPERS, (*present, ours))
    kind = type(inspect.getattr_static(owner, name))
    setattr(owner, name, kind(replacement) if kind in (classmethod, staticmethod) else replacement)


def around(original: Function, ours: Function) -> Function:
    """Return a function that calls `ours` with the original, its `__wrapped__`, and the arguments."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return replacement


def check(owner: Any, name: str, expects: Sequence[str]) -> Function:
    """Return the function `owner.name`. Raises StartError if its parameters are not `expects`."""
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


def wrappers(owner: Any, name: str) -> tuple[Function, ...]:
    """Return our functions around `owner.name`, innermost first."""
    present: tuple[Function, ...] = getattr(getattr(owner, name), _WRAPPERS, ())
    return present


def _parameters_of(function: Function) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # a pybind11 function, whose docstring begins with its first overload
        first = re.search(r"^1\. \w+\((.*)\) ->", function.__doc__ or "", re.MULTILINE)
        return tuple(re.findall(r"(\w+): ", first[1])) if first else ()


def _symbol(owner: Any, name: str) -> str:
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}.{name}"
