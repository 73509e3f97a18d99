import pytest

from tests.services.offline.router import router


@pytest.fixture
async def served():
    async with router() as one:
        yield one
