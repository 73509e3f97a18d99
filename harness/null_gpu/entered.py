"""Notes which patches of vLLM are entered, in the file that NULL_GPU_ENTERED names."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = "NULL_GPU_ENTERED"
_PACKAGE = "baton.services.engine.patches."
Entry = tuple[str, str]  # the patch, and the attribute that it replaces
Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]


def count(module: ModuleType) -> None:
    """Have `replace` put a counter around each wrapper."""
    real = module.replace

    def replace(owner: Any, name: str, wrapper: Wrapper, expects: Sequence[str]) -> None:
        real(owner, name, _counting(wrapper, name), expects)

    if FILE in os.environ:
        module.replace = replace  # type: ignore[attr-defined]


def read(file: Path) -> set[Entry]:
    """Return what was entered."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {(patch, attribute) for patch, _, attribute in (line.partition(" ") for line in lines)}


@functools.cache  # the same wrapper is known again
def _counting(wrapper: Wrapper, name: str) -> Wrapper:
    @functools.wraps(wrapper)
    def counting(original: Function) -> Function:
        made = wrapper(original)

        @functools.wraps(made)
        def entering(*args: Any, **named: Any) -> Any:
            _note(wrapper.__module__.removeprefix(_PACKAGE), name)
            return made(*args, **named)

        return entering

    return counting


@functools.cache
def _note(patch: str, attribute: str) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(f"{patch} {attribute}\n")
