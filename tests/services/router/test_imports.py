"""The router's parts import only the parts below them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.support import ROOT

ROUTER = ROOT / "services" / "router"
FILES = sorted(ROUTER.rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, those for type checkers included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name(file: Path) -> str:
    return str(file.relative_to(ROUTER))


@pytest.mark.parametrize("file", FILES, ids=name)
def test_a_part_imports_what_is_below_it(file: Path) -> None:
    part = file.relative_to(ROUTER).parts[0]
    forbidden = ["baton.services.worker", "baton.services.cli", "baton.services.fleet"]
    if part != "vllm":
        forbidden += ["vllm."]
    if part not in ("vllm", "http"):
        forbidden += ["baton.services.router.vllm", "baton.services.router.http"]
    assert [one for one in imports(file) if f"{one}.".startswith(tuple(forbidden))] == []


def test_no_module_imports_itself_in_a_circle() -> None:
    """Nor by a late import, nor for type checkers alone."""
    modules = {f"baton.services.router.{name(file)[:-3].replace('/', '.')}": file for file in FILES}
    below = {
        module: {
            other for other in modules if any(f"{one}.".startswith(f"{other}.") for one in imports(file))
        }
        for module, file in modules.items()
    }
    while leaves := {module for module, others in below.items() if not others & below.keys()}:
        below = {module: others for module, others in below.items() if module not in leaves}
    assert sorted(below) == []
