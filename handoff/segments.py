"""Shared memory that outlives nobody: named, mapped by any process of the host, removed with its owner.

Owner: `create`, `Segment.close`; at start `remove_stale`. Reader: `attach`.

A segment's owner holds a lock on it (flock) for as long as it lives. The kernel drops that lock however the
owner ends, so a segment whose lock can be taken is a dead owner's: unlike a process id, this also holds
across containers that share /dev/shm. The name appears only after the lock is held (O_TMPFILE, then
linkat), so no start-up sweep can catch a segment half made.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

DIRECTORY = Path("/dev/shm")  # noqa: S108 (where POSIX shared memory lives on Linux)
_PREFIX = "baton-kv-"
_NAME = re.compile(rf"{_PREFIX}[0-9]+-[0-9a-f]{{12}}")
_PAGE = mmap.PAGESIZE
_TOUCH_BYTES = 4 << 20  # touched at once; between two the thread can be told to stop by its process' end


class Segment:
    """A shared memory segment of this process: `name`, `data` [size] uint8, writable."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self.data: Bytes = np.frombuffer(memory, np.uint8)
        self._memory = memory  # holds the descriptor, and with it the lock

    def close(self) -> None:
        """Remove the name; the memory goes when its last reader unmaps it. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            (DIRECTORY / self.name).unlink()


def create(size: int) -> Segment:
    """A segment of `size` bytes, every page present.

    The first touch of a fresh page costs as much as 30 copies of it, so it happens here, not in a save.
    Raises OSError (ENOSPC) where /dev/shm is too small: it is asked now, for a later write would end in
    SIGBUS.
    """
    name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
    descriptor = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    directory = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        memory = mmap.mmap(descriptor, size)
        segment = Segment(name, memory)
        for start in range(0, size, _TOUCH_BYTES):
            segment.data[start : start + _TOUCH_BYTES : _PAGE] = 0
        # A directory descriptor makes this linkat(2), which alone follows the link in /proc.
        os.link(
            f"/proc/self/fd/{descriptor}",
            name,
            src_dir_fd=directory,
            dst_dir_fd=directory,
            follow_symlinks=True,
        )
    finally:
        os.close(directory)
        os.close(descriptor)  # the mapping keeps a duplicate of it
    return segment


def attach(name: str) -> Bytes:
    """Map another process' segment: [size] uint8, read-only; unmapped when the array goes.

    Raises FileNotFoundError when its owner is gone, ValueError for a name that is no segment's.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a segment")
    descriptor = os.open(DIRECTORY / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(descriptor)


def exists(name: str) -> bool:
    """Whether the owner still keeps it."""
    return (DIRECTORY / name).exists()


def remove_stale() -> list[str]:
    """Remove what killed processes left behind; the names removed."""
    removed = []
    for path in DIRECTORY.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(descriptor)
    return removed
