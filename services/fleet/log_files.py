"""Manage the log files of a supervisor's parts: recreate missing ones, limit their size, read their tails.

Parts and their children write through inherited descriptors with O_APPEND, so a log is rotated by copying and
truncating it. Lines written between the end of the copy and the truncation are lost.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

MOST_BYTES = 32 << 20  # size at which a log becomes NAME.log.1
KEPT = 2  # older logs
LOOK_S = 10.0  # between two checks of the sizes
TAIL_BYTES = 64 << 10  # read from the end of a log, to say why a part ended
_PIECE = 1 << 20  # bytes per copied chunk
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def open_log(log: Path) -> int:
    """Open a log for appending; recreate its folder if it was removed. Raises OSError."""
    try:
        return os.open(log, _FLAGS, 0o644)
    except FileNotFoundError:
        log.parent.mkdir(parents=True, exist_ok=True)
        return os.open(log, _FLAGS, 0o644)


def tail(log: Path, since: int = 0) -> list[str]:
    """Return the last non-empty lines of a log from byte `since` on; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(size - TAIL_BYTES, since if since <= size else 0)
            file.seek(begin)
            printed = file.read(TAIL_BYTES)
    except OSError:
        return []
    return [line for line in printed.decode(errors="replace").splitlines() if line.strip()]


def own_error(lines: Iterable[str]) -> str:
    """Return the last error that a Baton command printed, without its prefix, or ""."""
    own = [line for line in lines if line.startswith("baton: error: ")]
    return own[-1].removeprefix("baton: error: ") if own else ""


class Rotation:
    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._due = time.monotonic() + LOOK_S

    @property
    def due_s(self) -> float:
        """Return the seconds until the next check."""
        return max(0.0, self._due - time.monotonic())

    def look(self, logs: Iterable[Path]) -> list[Path]:
        """If a check is due, rotate the logs that are too large; return those."""
        now = time.monotonic()
        if now < self._due:
            return []
        self._due = now + LOOK_S
        return [log for log in logs if self._rotated(log)]

    def _rotated(self, log: Path) -> bool:
        try:
            if log.stat().st_size <= self._most_bytes:
                return False
            for number in range(KEPT, 1, -1):
                older = _older(log, number - 1)
                if older.exists():
                    older.replace(_older(log, number))
            return self._cut(log)
        except OSError:  # removed, or not ours; retried at the next check
            return False

    def _cut(self, log: Path) -> bool:
        copy = _older(log, 1)
        with log.open("r+b") as file:
            try:
                with copy.open("wb") as kept:
                    shutil.copyfileobj(file, kept, _PIECE)
            except OSError:  # a full disk: losing log lines is better than a disk that stays full
                copy.unlink(missing_ok=True)
            file.truncate(0)
        return True


def _older(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
