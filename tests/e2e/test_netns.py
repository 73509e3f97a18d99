"""harness/netns.py: hosts are isolated, and nothing remains afterwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness.netns import Network, User, why_not
from harness.support import ROOT, eventually

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def test_hosts_reach_each_other_and_share_nothing_else(tmp_path):
    with Network(tmp_path) as network:
        a = network.host("a", shm_mib=3)
        b = network.host("b", ["sleep", "infinity"], service="store", user=User(54321))
        looked = b.run(["sh", "-c", "getent ahostsv4 store; hostname; id -u; echo $$; touch /x"], 10)
        assert looked.stdout.split()[0] == b.address
        assert looked.stdout.split()[-3:-1] == ["b", "54321"]
        assert int(looked.stdout.split()[-1]) < 10  # its own process ids
        assert looked.returncode != 0  # it may not write everywhere
        assert a.run(["df", "--output=size", "/dev/shm"], 10).stdout.split()[-1] == str(3 << 10)
        a.run(["touch", "/dev/shm/mine"], 10)
        assert b.run(["ls", "/dev/shm"], 10).stdout == ""
        with a.inside():
            links = Path("/proc/thread-self/net/dev").read_text()
        assert "eth0" in links
        server = b.start([sys.executable, "-m", "http.server", "8000", "--bind", "::"], cwd=ROOT / "docs")
        ask = f"import urllib.request as u; u.urlopen('http://[{b.address6}]:8000/', timeout=2)"
        eventually(
            lambda: a.run([sys.executable, "-c", ask], 10).returncode == 0, 20, "b answers a over IPv6"
        )
        assert server.poll() is None
        b.kill()
        assert server.poll() is not None


def test_nothing_outlives_a_killed_test(tmp_path):
    script = f"""
from pathlib import Path
from harness.netns import Network
with Network(Path({str(tmp_path)!r})) as network:
    network.host("a").start(["sleep", "1234"])
    print("up", flush=True)
    input()
"""
    test = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert test.stdout is not None
        assert test.stdout.readline() == b"up\n"
        family = psutil.Process(test.pid).children(recursive=True)
        assert len(family) >= 4  # the bridge's; the host's, its first process, the other
    finally:
        os.kill(test.pid, signal.SIGKILL)
        test.communicate(timeout=10)
    eventually(
        lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family),
        10,
        "all have ended",
    )
