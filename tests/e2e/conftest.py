"""Deployments that the end-to-end tests share, because a start takes ten seconds."""

from contextlib import ExitStack

import pytest

from harness.collector import SENT_SOON, collecting
from harness.deployment import deployment, stock_vllm
from harness.support import QUICK
from tests.e2e.sharing import SHARING

SLOW_CLIENT_S = 4.0  # router.slow_client_s of one_pair
# Waits for a prompt's prefix, longer than the pauses of a busy machine.
WAITS = ("baton.services.worker.entrance:PREFIX_WAIT_S", "baton.services.router.prefix:PREFIX_WAIT_S")
SHARING_FILES = {f"test_{name}" for name in SHARING}
_running = {}  # fixture -> what it started
_ends = ExitStack()  # ends what runs


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Stop them after the last file that shares them, because idle engines slow other tests down."""
    if nextitem is None or (nextitem.path != item.path and nextitem.path.stem not in SHARING_FILES):
        _running.clear()
        _ends.close()


@pytest.fixture(scope="session")
def collector():
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def one_pair(tmp_path_factory, collector):
    """Start 1P1D with `baton up`, memory store, shm, or share it. Tests must leave it as they found it."""
    if "one_pair" not in _running:
        config = {
            # Frequent heartbeats, so that changes show within a second. By default this model recomputes a
            # long prompt rather than pull it.
            "tracing": collector.settings,
            "slo": {"ttft_ms": 1e6},  # no request is traced for being slow
            "constants": {
                **QUICK,
                "baton.services.config.workers:PREFIX_PULL_S": 0.01,
                **dict.fromkeys(WAITS, 8.0),
                "baton.services.router.serving:SLOW_CLIENT_S": SLOW_CLIENT_S,
            },
        }
        made = deployment(tmp_path_factory.mktemp("one-pair"), environment=SENT_SOON, **config)
        _running["one_pair"] = _ends.enter_context(made).up()
    return _running["one_pair"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return the URL of stock vLLM, one aggregated engine with the same model; start it or share it."""
    if "reference" not in _running:
        # One core: OpenMP threads that share a busy core spin.
        one_core = {"VLLM_CPU_OMP_THREADS_BIND": "0"}
        made = stock_vllm(tmp_path_factory.mktemp("stock"), one_core)
        _running["reference"], _ = _ends.enter_context(made)
    return _running["reference"]
