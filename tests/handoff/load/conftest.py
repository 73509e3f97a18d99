"""A source and a loader with a mock transport between them."""

import pytest

from tests.handoff.caches import make_cache, pair_of, source
from tests.handoff.mock import Mock

CACHE_BLOCKS = 25


@pytest.fixture
def wire_dtype():
    return "auto"


@pytest.fixture
def offered():
    return ["shm", "tcp"]


@pytest.fixture
def mock():
    return Mock()


@pytest.fixture
def pair(wire_dtype, offered, mock):
    saving = source(make_cache(CACHE_BLOCKS, 1, wire_dtype), names=offered)
    Mock.sources[saving.service.address] = saving.staging
    with pair_of(saving, make_cache(CACHE_BLOCKS, 2, wire_dtype), [mock]) as made:
        yield made
    Mock.sources.clear()
