"""Inspections of a machine."""

import os
import time

from baton import machine
from baton.scheduler import ask


def test_a_hanging_nvidia_smi_is_reported_in_time(tmp_path, monkeypatch):
    """If it were not, the scheduler's call would time out without the rest of the inspection."""
    assert machine.GPU_TIMEOUT_S < ask.INSPECT_TIMEOUT_S
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "GPU_TIMEOUT_S", machine.GPU_TIMEOUT_S / 10)
    began = time.monotonic()
    (said,) = machine.inspection().machine.gpus
    assert time.monotonic() - began < ask.INSPECT_TIMEOUT_S
    assert "nvidia-smi fails" in said
    assert "timed out" in said
