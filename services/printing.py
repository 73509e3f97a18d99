"""Print to stdout and stderr without ever raising or blocking.

A pipe's reader may have exited or stalled, a disk filled up, or a terminal closed; none of these may crash or
block a process. Lines that cannot be written now are buffered, up to a limit, and retried. The number of lost
lines is printed once writing works again. There is no writer thread, because the supervisor forks.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from typing import Any, TextIO

MOST_KEPT = 1 << 20  # bytes of buffered lines
RETRY_S = 0.5
LAST_S = 1.0  # time for the remaining lines when the process ends
_LOOK_S = 1.0  # between checks for a redirected descriptor
_PIECE = select.PIPE_BUF  # a writable pipe has room for at least this much

_GONE = {errno.EPIPE, errno.ENXIO}  # no reader; a named pipe may get one later


class Printer:
    """Writes lines to a file descriptor. Safe in threads and signal handlers."""

    def __init__(self, descriptor: int, *, tells: bool = True) -> None:
        """Write to `descriptor`. `tells`: report lost lines; False for output that a program parses."""
        self._descriptor = descriptor
        self._tells = tells
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self._kept = 0  # bytes in `_waiting`
        self._begun = False  # the first line is partly written
        self._lost = 0  # lines
        self._full = False  # the buffer overflowed: its lines are older than the lost ones
        self._own = -1  # a non-blocking descriptor private to this process, or -1
        self._seen: tuple[int, int] | None = None  # device and inode of `_own`
        self._is_file = False
        self._look_at = 0.0  # time.monotonic of the next redirection check

    def write(self, data: bytes) -> None:
        """Write one or more lines, or buffer them."""
        with self._lock:
            if not self._waiting and not self._lost and self._is_file and time.monotonic() < self._look_at:
                data = self._written(data)  # fast path for log lines
                if not data:
                    return
            if self._kept + len(data) > MOST_KEPT:
                self._lost += data.count(b"\n")
                self._full = True
            else:
                self._waiting.append(data)
                self._kept += len(data)
            self._flush()

    def _written(self, data: bytes) -> bytes:
        try:
            return data[os.write(self._descriptor, data) :]
        except OSError:  # handled at the next try
            return data

    @property
    def behind(self) -> bool:
        return bool(self._waiting)

    def catch_up(self) -> None:
        """Write as many buffered lines as possible."""
        with self._lock:
            self._flush()

    def forget(self) -> None:
        """Drop the buffered lines, which belong to the parent after a fork."""
        self._lock = threading.RLock()
        self._waiting.clear()
        self._kept = self._lost = 0
        self._begun = self._full = False
        self._look_at = 0.0

    def _flush(self) -> None:
        try:
            if not self._full:
                self._tell_lost()
            while self._waiting and self._write_first():
                pass
            if not self._waiting:
                self._tell_lost()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EINTR):
                self._drop()

    def _tell_lost(self) -> None:
        if not self._lost or not self._tells or self._begun:
            return
        descriptor = self._descriptor_for_writing()
        if descriptor >= 0:
            os.write(descriptor, b"  (%d lines could not be printed)\n" % self._lost)
            self._lost, self._full = 0, False

    def _write_first(self) -> bool:
        """Write a piece of the first line; return whether there was room for it."""
        data = self._waiting[0]
        descriptor = self._descriptor_for_writing()
        if descriptor < 0:
            return False
        written = os.write(descriptor, data[:_PIECE])
        self._kept -= written
        if written == len(data):
            self._waiting.popleft()
            self._begun = False
        else:
            self._waiting[0] = data[written:]
            self._begun = True
        return True

    def _descriptor_for_writing(self) -> int:
        """Return a descriptor that can be written now without blocking, or -1."""
        now = time.monotonic()
        if now >= self._look_at:  # the descriptor may have been redirected since
            found = os.fstat(self._descriptor)
            self._is_file = stat.S_ISREG(found.st_mode)
            if not self._is_file and self._seen != (found.st_dev, found.st_ino):
                self._reopen(found)
            self._look_at = now + _LOOK_S
        if self._is_file:
            return self._descriptor
        if self._own >= 0:
            return self._own
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return self._descriptor if poll.poll(0) else -1

    def _reopen(self, found: os.stat_result) -> None:
        """Reopen the pipe or terminal as a private, non-blocking file description.

        The inherited one is shared with other processes, such as the shell, and must stay blocking.
        """
        if self._own >= 0:
            os.close(self._own)
        self._own, self._seen = -1, (found.st_dev, found.st_ino)
        if stat.S_ISFIFO(found.st_mode) or stat.S_ISCHR(found.st_mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            try:
                self._own = os.open(f"/proc/self/fd/{self._descriptor}", flags)
            except OSError as error:  # no /proc, or another user's terminal: poll before each write
                if error.errno in _GONE:
                    self._seen = None
                    raise

    def _drop(self) -> None:
        self._lost += sum(one.count(b"\n") for one in self._waiting)
        self._waiting.clear()
        self._kept = 0
        self._begun = self._full = False


_printers = {1: Printer(1), 2: Printer(2)}


def _forget_all() -> None:
    for one in _printers.values():
        one.forget()


os.register_at_fork(after_in_child=_forget_all)


def printer(descriptor: int) -> Printer:
    """Return the one printer of a descriptor, shared by all callers."""
    if descriptor not in _printers:  # such a descriptor carries events for a program: keep our own lines out
        _printers[descriptor] = Printer(descriptor, tells=False)
    return _printers[descriptor]


def say(text: str) -> None:
    put(sys.stdout, text + "\n")


def step(since_s: float, name: str, text: str, width: int = 12) -> str:
    """Return a line about an event of a part, `since_s` seconds after the start."""
    return f"  [{since_s:5.1f} s] {name:<{width}} {text}"


def complain(text: str) -> None:
    put(sys.stderr, text + "\n")


def put(stream: TextIO | None, text: str) -> None:
    """Write text to a stream without raising or blocking."""
    if stream is None:  # closed when Python started
        return
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # not a file, as in a test or notebook
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    printer(descriptor).write(text.encode(encoding, "backslashreplace"))


class Unfailing(io.TextIOBase):
    """A stream that never raises or blocks, for libraries."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        put(self._stream, text)
        return len(text)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # TextIOBase has an attribute
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def guard() -> None:
    """Make output of this process and its libraries never raise or block. For long-running processes."""
    if not isinstance(sys.stdout, Unfailing):
        sys.stdout, sys.stderr = Unfailing(sys.stdout), Unfailing(sys.stderr)


def catch_up() -> float | None:
    """Retry buffered lines. Return the seconds until the next retry, or None if nothing is buffered."""
    for one in list(_printers.values()):
        if one.behind:
            one.catch_up()
    return RETRY_S if any(one.behind for one in list(_printers.values())) else None


def finish(within_s: float = LAST_S) -> None:
    """Write buffered lines for at most this many seconds, before the process exits."""
    deadline = time.monotonic() + within_s
    while catch_up() is not None and time.monotonic() < deadline:
        time.sleep(0.02)


def open_streams() -> None:
    """Open /dev/null in place of each standard stream that this process was started without.

    Otherwise the next file opened would get that descriptor's number, and output would go into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
    streams: dict[str, Any] = {"stdin": (0, "r"), "stdout": (1, "w"), "stderr": (2, "w")}
    for name, (descriptor, mode) in streams.items():
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
