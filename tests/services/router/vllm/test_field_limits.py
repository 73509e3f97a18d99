"""Fields that cost more than their bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.services.router.vllm.field_limits import MAX_CHARACTERS, MAX_TOOLS, field_problem


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"bad_words": ["word " * 12_000] * 100}, "bad_words has 6000000 characters; 16384 are allowed"),
        ({"stop": "x" * 20_000}, "stop has 20000 characters"),
        ({"stop": ["x" * 10_000] * 2}, "stop has 20000 characters"),
        ({"query": "x" * 70_000, "items": []}, "query has 70000 characters"),
        ({"items": ["x" * 700] * 100}, "items has 70000 characters"),
        ({"cache_salt": "x" * 5_000}, "cache_salt has 5000 characters"),
        ({"tools": [{}] * 513}, "tools has 513 entries; 512 are allowed"),
        ({"items": [[1] * 70_000]}, ""),
        ({"bad_words": ["word"] * 128, "stop": None, "tools": [{}] * MAX_TOOLS}, ""),
        ({name: "x" * size for name, size in MAX_CHARACTERS.items()}, ""),
        ({}, ""),
    ],
)
def test_what_is_too_long_is_refused(fields: dict[str, Any], problem: str) -> None:
    assert field_problem(SimpleNamespace(**fields)).startswith(problem)
    assert bool(field_problem(SimpleNamespace(**fields))) == bool(problem)
