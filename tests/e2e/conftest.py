"""Deployments that the end-to-end tests share, because a start takes ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.collector import SENT_SOON, Collector, collecting
from harness.deployment import Deployment, deployment, stock_vllm

SLOW_CLIENT_S = 4.0  # of one_pair's router


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture(scope="session")
def one_pair(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Deployment]:
    """Start 1P1D with `baton up`, memory store, shm. Tests must leave it as they found it."""
    config: dict[str, Any] = {
        # Frequent heartbeats, so that changes show within a second. By default this model recomputes a long
        # prompt rather than pull it.
        "scheduler": {"heartbeat_s": 0.2, "prefix_pull_s": 0.01},
        "tracing": collector.settings,
        "slo": {"ttft_ms": 1e6},  # no request is traced for being slow
    }
    constants = {"baton.services.router.serving:SLOW_CLIENT_S": SLOW_CLIENT_S}
    folder = tmp_path_factory.mktemp("one-pair")
    with deployment(folder, environment=SENT_SOON, constants=constants, **config) as one:
        yield one.up()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of stock vLLM: one aggregated engine with the same model."""
    # One core: OpenMP threads that share a busy core spin.
    one_core = {"VLLM_CPU_OMP_THREADS_BIND": "0"}
    with stock_vllm(tmp_path_factory.mktemp("stock"), one_core) as (url, _):
        yield url


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
