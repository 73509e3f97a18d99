"""A prefill and a mixed worker that the tests share; tests leave them as they found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoints import tiny_qwen2
from tests.services.worker.fleet import Fleet, Worker, fleet


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("workers")
    model = tiny_qwen2(folder / "tiny")
    with fleet(model, folder) as started:
        yield started


@pytest.fixture(scope="session")
def prefill(workers: Fleet) -> Worker:
    return workers.started("prefill")


@pytest.fixture(scope="session")
def mixed(workers: Fleet) -> Worker:
    return workers.started("mixed")
