"""A prefill and a mixed worker for all tests of this folder, which must leave them idle."""

import contextlib
from pathlib import Path

import pytest

from harness.checkpoints import tiny_qwen2
from harness.workers import fleet
from tests.services.worker.router import connected

_started = contextlib.ExitStack()


@pytest.fixture(scope="session")
def workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    model = tiny_qwen2(folder / "tiny")
    yield _started.enter_context(fleet(model, folder))
    _started.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    """Stop them after the last test of this folder, because idle engines slow other tests down."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _started.close()


@pytest.fixture(scope="session")
def prefill(workers):
    return workers.started("prefill")


@pytest.fixture(scope="session")
def mixed(workers):
    return workers.started("mixed")


@pytest.fixture
async def source(prefill):
    """Yield a router's stream to the prefill worker."""
    async with connected(prefill.address) as stream:
        yield stream


@pytest.fixture
async def target(mixed):
    """Yield a router's stream to the mixed worker."""
    async with connected(mixed.address) as stream:
        yield stream
