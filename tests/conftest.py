"""Order the test files and scale their timeouts.

Folders with engines come last: a session's engines live until its pytest worker ends, and idle ones use a few
hundredths of a core. Short files come at the very end, so that no worker idles for long. pytest-xdist hands
out whole files in this order (--no-loadscope-reorder), and files that share engines as one.
"""

import functools
import gc
import logging
import os
import signal
import sys
import urllib.error
from pathlib import Path

import hypothesis
import pytest
from httpx._transports import default as transports
from xdist.scheduler import LoadFileScheduling

from baton import rpc
from harness.support import PATIENCE
from tests.e2e.sharing import SHARING

# Files that compute alternate with files that wait, so that the workers do not all wait at the same time.
FIRST = (
    "kernels/verify/test_verify.py",
    "services/router/http/test_http.py",  # waits
    "kernels/kv_pack/test_kv_pack.py",
    "services/router/test_relay.py",  # waits
    "bench/test_speculation_table.py",
    "scheduler/test_endpoints.py",  # waits
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
# Later these two kinds of folders do, too.
COMPUTING = ("handoff/", "speculation/", "services/engine/")
WAITING = ("services/cli/", "services/fleet/", "services/router/")
ENGINES_LAST = ("services", "fuzz", "harness", "e2e")
# Then come the longest files with engines of their own.
LONG_FIRST = (
    "ray_serve",
    "ray_local",
    "ray_hosts",
    "compose",
    "gangs",
    "store_failures",
    "offline",
    "bad_start",
    "images",
    "live_page",
    "up",
    "roles",
    "continuation",
    "readme",
    "poison",
    "silent_drafter",
    "nodes",
    "unread",
    "schedulers",
    "frontend",
    "autoscale",
    "models",
    "abuse",
    "secrets",
)
E2E_FIRST = (*SHARING, *LONG_FIRST)
SHARING_FILES = {f"tests/e2e/test_{name}.py" for name in SHARING}
SHARING_FOLDER = "tests/services/worker/"

# `make null-gpu` runs these, in an environment with a GPU without arithmetic.
collect_ignore = [] if "harness.null_gpu.hooks" in sys.modules else ["null_gpu"]

# OpenMP threads that share a busy core spin while they wait for each other, which takes six to sixty times as
# long. torch reads this on import. Engines set their own number, and two threads that sleep while they wait
# use a seventh of the CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Child processes inherit an ignored SIGHUP (from nohup), but not a handler.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Each client of httpx (and openai) would read all certificates again, which takes 30 ms of a core.
transports.create_ssl_context = functools.cache(transports.create_ssl_context)

# An example's time depends on how busy the machine is.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# Do not collect garbage during the imports, and later leave what they created out of every collection.
gc.disable()


@pytest.fixture(autouse=True)
def same_identity():
    """Restore the process's TLS identity after each test."""
    identity, insecure = rpc._process.identity, rpc._process.insecure
    yield
    rpc.act_as(identity, insecure=insecure)


@pytest.fixture(autouse=True)
def same_log_level():
    """Set Baton's log level to INFO for each test, whatever packages did to the root logger."""
    logger = logging.getLogger("baton")
    level = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(level)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    shares = _shares(items)
    items.sort(key=lambda item: _rank(item, shares))
    for item in items:
        named = item.get_closest_marker("timeout")
        if named is not None:
            item.add_marker(pytest.mark.timeout(named.args[0] * PATIENCE), append=False)


def pytest_exception_interact(call, report):
    """Show the body of an HTTP error, which says what is wrong."""
    if isinstance(error := call.excinfo.value, urllib.error.HTTPError):
        report.sections.append(("the response's body", error.read().decode(errors="replace")))


def _path(item):
    return item.path.relative_to(Path(__file__).parent)


def _shares(items):
    """Return for each file of COMPUTING and of WAITING the share of its kind's files that come before it."""
    shares = {}
    for kind in (COMPUTING, WAITING):
        files = sorted({path for item in items if (path := _path(item)).as_posix().startswith(kind)})
        shares |= {path: number / len(files) for number, path in enumerate(files)}
    return shares


def _rank(item, shares):
    path = _path(item)
    if path.as_posix() in FIRST:
        return -1, FIRST.index(path.as_posix())
    if path in shares:
        return 1, shares[path]
    folder, *_ = path.parts
    name = item.path.stem.removeprefix("test_")
    within = E2E_FIRST.index(name) if folder == "e2e" and name in E2E_FIRST else len(E2E_FIRST)
    return (1 + ENGINES_LAST.index(folder) if folder in ENGINES_LAST else 0), within


class _Scheduling(LoadFileScheduling):
    """Hands out the files that share engines as one."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        if file in SHARING_FILES:
            return "e2e"
        return SHARING_FOLDER if file.startswith(SHARING_FOLDER) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return _Scheduling(config, log) if config.getoption("dist") == "loadfile" else None
