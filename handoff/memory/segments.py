"""Named shared memory that other processes can map, and that is removed after its owner's death.

The owner holds a lock (flock) on its segment, which the kernel drops however the owner ends. A segment whose
lock can be taken is therefore stale. This holds even across containers that share /dev/shm, in which process
ids are ambiguous. A segment gets its name only after it is locked (O_TMPFILE, then linkat), so that another
process's sweep (`remove_stale`) cannot catch a half-made segment.
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

DIRECTORY = Path("/dev/shm")  # noqa: S108 (POSIX shared memory on Linux)
_PREFIX = "baton-kv-"
_NAME = re.compile(rf"{_PREFIX}[0-9]+-[0-9a-f]{{12}}")
# do not block on a named pipe or follow a link
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
PAGE = mmap.PAGESIZE
_PIN_BYTES = 64 << 20  # pinned at a time by a reader
_TOUCH_BYTES = 4 << 20  # touched at a time; in between, the thread can end with its process


class Segment:
    """A segment of this process. `data`: [size] uint8, writable where it was grown."""

    def __init__(self, name: str, descriptor: int, size: int) -> None:
        self.name = name
        memory = mmap.mmap(descriptor, size)  # duplicates the descriptor and so keeps the lock
        self.data: Bytes = np.frombuffer(memory, np.uint8)
        self._descriptor = descriptor

    def grow(self, start: int, stop: int) -> None:
        """Fault in zeroed pages from `start` to `stop`, both page-aligned.

        Touching a fresh page costs as much as copying 30 pages, too much for a save. Raises OSError (ENOSPC)
        if /dev/shm is full; without posix_fallocate, a later write would end in SIGBUS.
        """
        os.posix_fallocate(self._descriptor, start, stop - start)
        for at in range(start, stop, _TOUCH_BYTES):
            self.data[at : min(at + _TOUCH_BYTES, stop) : PAGE] = 0

    def close(self) -> None:
        """Remove the name; the memory is freed when its last reader unmaps it. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            (DIRECTORY / self.name).unlink()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def create(size: int, present: int | None = None) -> Segment:
    """Make a segment of which the first `present` bytes (default: all) are grown. Raises OSError."""
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
        # with a directory descriptor this is linkat(2), the only call that follows the link in /proc
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
    """Another process' segment. `data`: [size] uint8, read-only, unmapped with the array."""

    def __init__(self, descriptor: int) -> None:
        self.data: Bytes = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self._pinned = 0  # bytes
        self._pinning = threading.Lock()

    def pin(self, device: Device, stop: int) -> None:
        """Pin another step of grown memory, if needed for `stop`; pinning the rest would fault it in."""
        with self._pinning:
            if stop <= self._pinned:
                return
            grown = os.lseek(self._descriptor, self._pinned, os.SEEK_HOLE)
            memory = self.data[self._pinned : min(grown, self._pinned + _PIN_BYTES)]
            if not memory.size:
                return
            if device.pin(memory):
                weakref.finalize(self.data, device.unpin, memory.ctypes.data).atexit = False
            self._pinned += memory.size  # even after a failure, which would only repeat


def attach(name: str) -> Attached:
    """Map another process' segment. Raises FileNotFoundError if it is gone, ValueError for a bad name."""
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
    return (DIRECTORY / name).exists()


def remove_stale() -> list[str]:
    """Remove dead processes' segments; return their names. Tolerates any file: anyone can write there."""
    removed = []
    for path in DIRECTORY.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, _READ)
        except OSError:
            continue  # removed, a link, or not ours to read
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
        except OSError:
            continue  # the owner is alive, or we may read but not remove another user's file
        finally:
            os.close(descriptor)
    return removed
