"""A prefill and a mixed worker for all tests of this folder, which must leave them idle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.checkpoints import tiny_qwen2
from harness.workers import Fleet, Worker, fleet

_started = contextlib.ExitStack()


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("workers")
    model = tiny_qwen2(folder / "tiny")
    yield _started.enter_context(fleet(model, folder))
    _started.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Stop them after the last test of this folder, because idle engines slow other tests down."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _started.close()


@pytest.fixture(scope="session")
def prefill(workers: Fleet) -> Worker:
    return workers.started("prefill")


@pytest.fixture(scope="session")
def mixed(workers: Fleet) -> Worker:
    return workers.started("mixed")
