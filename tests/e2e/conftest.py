"""Engines that the end-to-end tests share: started once, as each start takes ten seconds and more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.collector import SENT_SOON, Collector, collecting
from harness.deployment import Deployment, deployment, stock_vllm


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Serve a collector of traces; those of ordinary requests are kept where the client says so."""
    with collecting() as one:
        yield one


@pytest.fixture(scope="session")
def one_pair(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Deployment]:
    """Start 1P1D with `baton up`, memory store, shm. Tests must leave it as they found it."""
    config: dict[str, Any] = {
        # Quick enough to see what happens within a second. This model computes a long prompt in less time
        # than by default pays for a pull.
        "scheduler": {"heartbeat_s": 0.2, "prefix_pull_s": 0.01},
        "tracing": collector.settings,
        "slo": {"ttft_ms": 1e6},  # no request is traced for being slow
    }
    with deployment(tmp_path_factory.mktemp("one-pair"), environment=SENT_SOON, **config) as one:
        yield one.up()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of stock vLLM, one aggregated engine, on the same model."""
    # One core: two threads that wait for each other crawl when something else needs a core.
    one_core = {"VLLM_CPU_OMP_THREADS_BIND": "0"}
    with stock_vllm(tmp_path_factory.mktemp("stock"), one_core) as (url, _):
        yield url


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
