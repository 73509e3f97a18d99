"""The order of the test files: long ones first, so that no process has one left when the others are done."""

from __future__ import annotations

from pathlib import Path

import pytest

# pytest-xdist hands out whole files in this order (--no-loadscope-reorder). Those not named are short.
LONG_FIRST = ("e2e", "speculation", "chaos", "fuzz", "services", "handoff")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return LONG_FIRST.index(folder) if folder in LONG_FIRST else len(LONG_FIRST)
