import os
import signal
from pathlib import Path

import pytest

from baton.services.fleet.endings import ending
from harness.support import PYTHON, ran

LIMIT = 256 << 20


def test_signals_have_names():
    assert (ending(3), ending(-9), ending(-40)) == ("status 3", "signal SIGKILL", "signal 40")


@pytest.fixture
def cgroup():
    """Yield a cgroup with little memory, in this machine's version of cgroups."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        one = Path(base) / f"baton-test-{os.getpid()}"
        try:
            one.mkdir()
        except OSError:
            continue
        try:
            (one / limit).write_text(str(LIMIT))
        except OSError:
            one.rmdir()
            continue
        yield one
        one.rmdir()
        return
    pytest.skip("may not make a cgroup with a limit of memory")


def test_too_little_memory_is_reported(cgroup, tmp_path):
    """The kernel kills a part at its cgroup's limit, and the part's last line is unrelated."""
    code = f"""
import os, signal, sys, time
from pathlib import Path
open({str(cgroup / "cgroup.procs")!r}, "w").write(str(os.getpid()))
from baton.services.errors import StartError
from baton.services.fleet.parts import Kind, Parts

def greedy():
    os.write(2, b"WARNING: something else\\n")
    held = []
    while True:
        held.append(bytearray(b"x" * (1 << 20)))

parts = Parts(Path({str(tmp_path)!r}), lambda name, text: print(name, text, flush=True))
parts.add("decode-0", Kind.WORKER, greedy)
parts.members[0].proven = True
deadline = time.monotonic() + 100
while not parts.members[0].budget.deaths and time.monotonic() < deadline:
    parts.reap()
    time.sleep(0.01)
parts.members[0].proven = False
try:
    while time.monotonic() < deadline:
        parts.reap()
        time.sleep(0.01)
except StartError as error:
    print(error)
"""
    done = ran(PYTHON, "-c", code)
    died, ended = done.stdout.splitlines()
    why = "the kernel ended a process because the memory limit of its cgroup, 0.2 GiB, was used up"
    assert died.startswith(f"decode-0 died (signal {signal.SIGKILL.name}: {why}")
    assert ended.startswith(f"decode-0 could not start: it ended with signal SIGKILL, as {why}")
    assert "lower engine.kv_cache_gib" in ended
