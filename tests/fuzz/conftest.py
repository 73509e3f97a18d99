"""A deployment for all fuzzed requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.deployment import Deployment, deployment


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start a prefill and a decode worker. Frequent heartbeats soon show that nothing is left behind."""
    with deployment(tmp_path_factory.mktemp("target"), scheduler={"heartbeat_s": 0.1}) as one:
        yield one.up()
