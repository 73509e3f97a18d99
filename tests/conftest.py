"""The order of the test files, and their patience.

Those that share engines come last, folder by folder: a folder's engines live until its process of pytest
ends, and idle ones take some hundredths of a core each, so what comes after them is slowed down. Short files
end it, so that no process waits long for the others. pytest-xdist hands out whole files in this order
(--no-loadscope-reorder).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from baton import rpc
from harness.support import PATIENCE

# Beside files that compute, those that wait: else all processes of pytest wait at the same time.
FIRST = (
    "kernels/verify/test_verify.py",
    "services/router/http/test_http.py",  # waits
    "services/decode/test_draft_length.py",
    "kernels/kv_pack/test_kv_pack.py",
    "services/router/test_relay.py",  # waits
    "bench/test_speculation_table.py",
    "scheduler/test_endpoints.py",  # waits
    "bench/test_tools.py",
    "kernels/verify/test_distribution.py",
    "services/router/http/test_connections.py",  # waits
    "kernels/ngram_match/test_ngram_match.py",
    "deploy/test_dockerfile.py",
    "scheduler/test_service.py",  # waits
    "deploy/test_kubernetes.py",
    "scheduler/test_redis_moves.py",  # waits
    "docs/test_commands.py",
    "security/test_rotation.py",  # waits
    "services/router/http/test_tenants.py",  # waits
    "services/simulate/test_simulation.py",
    "deploy/test_demo_model.py",
    "services/router/http/test_proxies.py",  # waits
    "handoff/test_mutations.py",
    "services/router/http/test_response_store.py",  # waits
    "services/router/http/test_apis.py",  # waits
    "scheduler/test_policy.py",
)
ENGINES_LAST = ("handoff", "speculation", "services", "fuzz", "harness", "e2e")
# Of e2e: minutes each, with engines of their own, the longest first; what is not named; then those that share
# the folder's engines.
LONG_FIRST = (
    "ray_hosts",
    "ray_local",
    "ray_serve",
    "failures",
    "compose",
    "up",
    "continuation",
    "offline",
    "store_failures",
    "silent_drafter",
    "bad_start",
    "readme",
)
SHARING_LAST = (
    "same_answers",
    "api",
    "other_packages",
    "vllm_metrics",
    "full_disk",
    "speculation",
)


# What only GPUs run: `make null-gpu` tests it, in an environment that has a GPU without arithmetic.
collect_ignore = [] if "harness.null_gpu.hooks" in sys.modules else ["null_gpu"]

# Two threads of OpenMP that share a busy core wait for each other, spinning: sixfold the time, and at times
# sixtyfold. torch reads this when it is loaded; what starts an engine says how many threads that has.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# nohup has it ignored, which all that tests start would inherit; what is caught is not inherited.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# What tests import, vLLM among it, is looked through no more: neither now nor in each later collection.
gc.disable()


@pytest.fixture(autouse=True)
def same_identity() -> Iterator[None]:
    """Give the process back the identity that it had before the test: later ones would speak as another."""
    identity, insecure = rpc._process.identity, rpc._process.insecure
    yield
    rpc.act_as(identity, insecure=insecure)


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """Let tests read the program's log whatever a package has set the root logger to."""
    logger = logging.getLogger("baton")
    level = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(level)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)
    for item in items:
        named = item.get_closest_marker("timeout")
        if named is not None:
            item.add_marker(pytest.mark.timeout(named.args[0] * PATIENCE), append=False)


def _rank(item: pytest.Item) -> tuple[int, int]:
    path = item.path.relative_to(Path(__file__).parent)
    if path.as_posix() in FIRST:
        return -1, FIRST.index(path.as_posix())
    folder, *_ = path.parts
    name = item.path.stem.removeprefix("test_")
    within = 0
    if folder == "e2e" and name in LONG_FIRST:
        within = LONG_FIRST.index(name) - len(LONG_FIRST)
    elif folder == "e2e" and name in SHARING_LAST:
        within = 1 + SHARING_LAST.index(name)
    return (1 + ENGINES_LAST.index(folder) if folder in ENGINES_LAST else 0), within
