"""A source and a loader with a mock transport between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.handoff.caches import Pair, make_cache, pair_of, source
from tests.handoff.mock import Mock

CACHE_BLOCKS = 25


@pytest.fixture
def wire_dtype() -> str:
    return "auto"


@pytest.fixture
def offered() -> list[str]:
    return ["shm", "tcp"]


@pytest.fixture
def mock() -> Mock:
    return Mock()


@pytest.fixture
def pair(wire_dtype: str, offered: list[str], mock: Mock) -> Iterator[Pair]:
    saving = source(make_cache(CACHE_BLOCKS, 1, wire_dtype), names=offered)
    Mock.sources[saving.service.address] = saving.staging
    with pair_of(saving, make_cache(CACHE_BLOCKS, 2, wire_dtype), [mock]) as made:
        yield made
    Mock.sources.clear()
