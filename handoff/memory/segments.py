"""Shared memory that never outlives its owner: named, mapped by any process of the host, removed with it.

The owner calls `create`, `Segment.grow` and `Segment.close`, and `remove_stale` at its start; a reader calls
`attach`.

A segment's owner holds a lock on it (flock) for as long as it lives. The kernel drops that lock however the
owner ends, so a segment whose lock can be taken has a dead owner: unlike a process id, this also holds across
containers that share /dev/shm. The name appears only after the lock is held (O_TMPFILE, then linkat), so that
no start-up sweep can catch a half-made segment.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from baton.handoff.records import Bytes

if TYPE_CHECKING:  # it imports torch
    from baton.handoff.memory.streams import Device

DIRECTORY = Path("/dev/shm")  # noqa: S108 (where POSIX shared memory lives on Linux)
_PREFIX = "baton-kv-"
_NAME = re.compile(rf"{_PREFIX}[0-9]+-[0-9a-f]{{12}}")
# Do not block on a named pipe, nor follow a link.
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
PAGE = mmap.PAGESIZE
_PIN_BYTES = 64 << 20  # pinned at once by a reader; the pages exist already
_TOUCH_BYTES = 4 << 20  # touched at once; between two of these the thread can end with its process


class Segment:
    """Own a shared memory segment: `name`, `data` [size] uint8, writable where it was grown."""

    def __init__(self, name: str, descriptor: int, size: int) -> None:
        self.name = name
        memory = mmap.mmap(descriptor, size)  # holds a duplicate of the descriptor, and with it the lock
        self.data: Bytes = np.frombuffer(memory, np.uint8)
        self._descriptor = descriptor

    def grow(self, start: int, stop: int) -> None:
        """Bring in the zeroed pages from `start` to `stop`, both page-aligned.

        The first touch of a fresh page costs as much as 30 copies of it, so it happens here, not in a save.
        Raises OSError (ENOSPC) if /dev/shm is too small: it must be found out now, as a later write would end
        in SIGBUS.
        """
        os.posix_fallocate(self._descriptor, start, stop - start)
        for at in range(start, stop, _TOUCH_BYTES):
            self.data[at : min(at + _TOUCH_BYTES, stop) : PAGE] = 0

    def close(self) -> None:
        """Remove the name; the memory goes when its last reader unmaps it. Idempotent. No `grow` after it."""
        with contextlib.suppress(FileNotFoundError):
            (DIRECTORY / self.name).unlink()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def create(size: int, present: int | None = None) -> Segment:
    """Make a segment of `size` bytes; the first `present` of them (all by default) are grown.

    The others cost nothing until they are grown. Raises OSError as `Segment.grow` does.
    """
    name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
    descriptor = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        segment = Segment(name, descriptor, size)
        segment.grow(0, size if present is None else present)
        _name(descriptor, name)
    except BaseException:
        os.close(descriptor)
        raise
    return segment


def _name(descriptor: int, name: str) -> None:
    directory = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # A directory descriptor makes this linkat(2), the only call that follows the link in /proc.
        os.link(
            f"/proc/self/fd/{descriptor}",
            name,
            src_dir_fd=directory,
            dst_dir_fd=directory,
            follow_symlinks=True,
        )
    finally:
        os.close(directory)


class Attached:
    """Map another process' segment: `data` [size] uint8, read-only, unmapped when the array goes."""

    def __init__(self, descriptor: int) -> None:
        self.data: Bytes = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self._pinned = 0  # bytes, from the start
        self._pinning = threading.Lock()

    def pin(self, device: Device, stop: int) -> None:
        """Pin a step more of what the owner has grown, unless everything up to `stop` is pinned.

        Memory not grown yet is left alone: pinning brings pages in, and that is for the owner to decide.
        """
        with self._pinning:
            if stop <= self._pinned:
                return
            grown = os.lseek(self._descriptor, self._pinned, os.SEEK_HOLE)
            memory = self.data[self._pinned : min(grown, self._pinned + _PIN_BYTES)]
            if not memory.size:
                return
            if device.pin(memory):
                weakref.finalize(self.data, device.unpin, memory.ctypes.data).atexit = False
            self._pinned += memory.size  # even if it was refused: it would be refused again


def attach(name: str) -> Attached:
    """Map another process' segment.

    Raises FileNotFoundError when the owner is gone, ValueError for an invalid name.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a segment")
    descriptor = os.open(DIRECTORY / name, _READ)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or not found.st_size:
            raise FileNotFoundError(f"{name} is not a segment")
        return Attached(descriptor)
    finally:
        os.close(descriptor)


def exists(name: str) -> bool:
    """Return whether the owner still keeps the segment."""
    return (DIRECTORY / name).exists()


def remove_stale() -> list[str]:
    """Remove segments that killed processes left behind; return their names.

    Every user may write to the folder, so nothing in it may fail or delay a start.
    """
    removed = []
    for path in DIRECTORY.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, _READ)
        except OSError:
            continue  # gone, a link, or another user's
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
        except OSError:
            continue  # the owner lives, or another user owns it and we may read but not remove it
        finally:
            os.close(descriptor)
    return removed
