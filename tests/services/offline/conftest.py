"""A router that fails on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.services.offline.router import Router, router


@pytest.fixture
async def served() -> AsyncIterator[Router]:
    async with router() as one:
        yield one
