"""Describe how a process ended: its status or signal, and whether memory ran out."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from baton.machine import cgroup_folders, cgroup_limit

_CURE = "give it more, run fewer workers here, or lower engine.kv_cache_gib"


def ending(code: int | None) -> str:
    """Describe how a process ended, from its exit code: `status 1` or `signal SIGKILL`."""
    if code is None or code >= 0:
        return f"status {code or 0}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"  # real-time signals have no names


class OutOfMemory:
    """Counts the processes in this cgroup and below that the kernel killed for lack of memory."""

    def __init__(self) -> None:
        self._told = _kills() or 0

    def words(self) -> str:
        """Return the reason for a kill that has not been reported yet, or ""."""
        kills = _kills() or 0
        if kills <= self._told:
            return ""
        self._told += 1  # each kill explains the end of one process
        limit = cgroup_limit()
        whose = (
            f"the memory limit of its cgroup, {limit / 2**30:.1f} GiB," if limit else "this machine's memory"
        )
        return f"the kernel ended a process because {whose} was used up: {_CURE}"


def _kills() -> int | None:
    for folder in cgroup_folders():
        for name in ("memory.events", "memory.oom_control"):
            found = _field(folder / name, "oom_kill")
            if found is not None:
                return found
    return _field(Path("/proc/vmstat"), "oom_kill")


def _field(file: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None
