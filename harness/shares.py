"""Processes held to a share of a core each, by CPU quotas of the kernel (cgroups of version 1).

with Shares(0.25) as shares:
    shares.hold(pid)  # from now on; again and again, for threads that it starts later
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000  # a process that used its share up waits for the rest of so long


def why_not() -> str:
    """Return why no shares can be given here, "" if they can."""
    if not (ROOT / "cpu.cfs_quota_us").exists() and not (ROOT / "tasks").exists():
        return f"{ROOT} is not there: it needs cgroups of version 1 with CPU quotas"
    return "" if os.access(ROOT, os.W_OK) else f"{ROOT} cannot be written: it needs root"


class Shares:
    """A group of its own for each process. Gone, with what they limited, when left."""

    def __init__(self, share: float) -> None:
        """`share`: of one core, for each process."""
        self._share = share
        self._name = f"shares-{os.getpid()}"
        self._cores = os.sched_getaffinity(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in ROOT.glob(f"{self._name}-*"):
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    (ROOT / "cgroup.procs").write_text(pid)
            group.rmdir()

    def hold(self, pid: int) -> None:
        """Hold a process to its share, on whichever core is free. Nothing happens if it is gone."""
        group = ROOT / f"{self._name}-{pid}"
        if not group.exists():
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(self._share * PERIOD_US)))
        with suppress(ProcessLookupError, FileNotFoundError):
            (group / "cgroup.procs").write_text(str(pid))
            for thread in os.listdir(f"/proc/{pid}/task"):  # each may be pinned
                os.sched_setaffinity(int(thread), self._cores)
