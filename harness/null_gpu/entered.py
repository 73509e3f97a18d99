"""Record which patches of vLLM are called, in the file that NULL_GPU_ENTERED names."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = "NULL_GPU_ENTERED"
_PACKAGE = "baton.services.engine.patches."
Entry = tuple[str, str]  # a patch, and the attribute that it replaces
Function = Callable[..., Any]


def count(module: ModuleType) -> None:
    """Make `replace` record the calls of each wrapper that it installs."""
    real = module.replace

    def replace(owner: Any, name: str, ours: Function, expects: Sequence[str] = ()) -> None:
        there = inspect.getattr_static(owner, name, None)
        real(owner, name, ours, expects)
        made = inspect.getattr_static(owner, name)
        if made is not there:
            kind, function = type(made), getattr(made, "__func__", made)
            noting = _noting(function, ours.__module__.removeprefix(_PACKAGE), name)
            setattr(owner, name, kind(noting) if kind in (classmethod, staticmethod) else noting)

    if FILE in os.environ:
        module.replace = replace  # type: ignore[attr-defined]


def read(file: Path) -> set[Entry]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {(patch, attribute) for patch, _, attribute in (line.partition(" ") for line in lines)}


def _noting(function: Function, patch: str, attribute: str) -> Function:
    @functools.wraps(function)
    def noting(*args: Any, **named: Any) -> Any:
        _note(patch, attribute)
        return function(*args, **named)

    noting.__dict__.update(function.__dict__)  # `replace` keeps its records there
    return noting


@functools.cache
def _note(patch: str, attribute: str) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(f"{patch} {attribute}\n")
