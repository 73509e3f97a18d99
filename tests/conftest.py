"""The order of the test files: those that share engines last, folder by folder.

A folder's engines live until its process of pytest ends, and idle ones take a twentieth of a core each: what
comes after them is slowed down. pytest-xdist hands out whole files in this order (--no-loadscope-reorder).
"""

from __future__ import annotations

from pathlib import Path

import pytest

ENGINES_LAST = ("handoff", "speculation", "services", "fuzz", "chaos", "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return 1 + ENGINES_LAST.index(folder) if folder in ENGINES_LAST else 0
