"""A process that is held to a share of a core gets no more."""

from __future__ import annotations

import subprocess

import psutil
import pytest

from harness import shares
from harness.shares import Shares
from harness.support import CALL_S, PYTHON, eventually


@pytest.mark.timeout(60)
def test_a_busy_process_gets_its_share() -> None:
    if why := shares.why_not():
        pytest.skip(why)
    with Shares(0.2) as held:
        busy = subprocess.Popen([PYTHON, "-c", "while True: pass"])
        one = psutil.Process(busy.pid)
        held.hold(busy.pid)
        group = shares.ROOT / f"{held._name}-{busy.pid}"
        began = one.cpu_times().user
        eventually(lambda: one.cpu_times().user > began + 0.2, 10, "it works")
        told = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        assert int(told["nr_throttled"]) >= 10  # of 100 periods a second
        busy.kill()
        busy.wait(CALL_S)
        held.hold(busy.pid)  # it is gone: nothing happens
    assert not group.exists()
