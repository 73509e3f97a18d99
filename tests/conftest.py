"""The order of the test files, and their patience.

Those that share engines come last, folder by folder: a folder's engines live until its process of pytest
ends, and idle ones take a twentieth of a core each, so what comes after them is slowed down. pytest-xdist
hands out whole files in this order (--no-loadscope-reorder).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import PATIENCE

ENGINES_LAST = ("handoff", "speculation", "services", "fuzz", "chaos", "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)
    for item in items:
        named = item.get_closest_marker("timeout")
        if named is not None:
            item.add_marker(pytest.mark.timeout(named.args[0] * PATIENCE), append=False)


def _rank(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return 1 + ENGINES_LAST.index(folder) if folder in ENGINES_LAST else 0
