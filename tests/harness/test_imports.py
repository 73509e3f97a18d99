"""Layers outside src: tests may import harness and bench, bench may import harness, never the reverse."""

import ast

import pytest

from harness.support import ROOT


def imported(file):
    """Yield the first name of each absolute import, those inside functions included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize(("folder", "above"), [("harness", {"bench", "tests"}), ("bench", {"tests"})])
def test_nothing_above_is_imported(folder, above):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert {file.name: found for file in files if (found := above & set(imported(file)))} == {}
