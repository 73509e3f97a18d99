"""Compute SHA-256 of large files, and keep each digest so that a file is read only once.

Entries are kept in a folder that only its user can write to. An entry is found by the file's device and
inode, and is valid while the file's size and times are unchanged (ctime cannot be set back). Files in a
Hugging Face cache are not read: they are links to blobs named by this digest. If several processes start
together, one hashes and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FOLDER = "baton/fingerprints"  # below the user's cache folder
THREADS = 16  # maximum; hashing releases the GIL and reaches 0.6 to 2 GB/s per core
KEEP_FROM = 1 << 20  # bytes; smaller files are hashed as quickly as looked up
QUIET_S = 2.0  # a file changed this recently may change again without a trace in its times
TELL_S = 10.0  # seconds between progress lines
SLOWEST = 20e6  # bytes/s; another process that hashes more slowly is not waited for
_LOOK_S = 0.1
_CHUNK = 8 << 20
_BLOB = re.compile(r"[0-9a-f]{64}")


def digests(paths: Sequence[Path]) -> list[str]:
    """Return each file's SHA-256 in hex, in order. Raises OSError if one cannot be read."""
    store = _Store.open()
    progress = _Progress(sum(path.stat().st_size for path in paths))
    largest = sorted(range(len(paths)), key=lambda at: -paths[at].stat().st_size)
    found = [""] * len(paths)

    def work(at: int) -> None:
        found[at] = _digest(paths[at], store, progress)

    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(work, largest))  # `list` raises the threads' errors
    progress.end()
    return found


def _digest(path: Path, store: _Store | None, progress: _Progress) -> str:
    if blob := _blob_of(path):
        return blob
    if store is None or path.stat().st_size < KEEP_FROM:
        with path.open("rb") as file:
            return _hash(file.fileno(), progress)
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        if known := store.find(before):
            return known
        with store.turn(before):
            if known := store.find(before):  # another process has hashed it
                return known
            began = time.time()
            digest = _hash(file.fileno(), progress)
            after = os.fstat(file.fileno())
            if _state(before) == _state(after) and began - after.st_ctime > QUIET_S:
                store.keep(after, digest)
            return digest


def _hash(file: int, progress: _Progress) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    view, at = memoryview(buffer), 0
    while count := os.preadv(file, [buffer], at):
        digest.update(view[:count])
        at += count
        progress.add(count)
    return digest.hexdigest()


def _blob_of(path: Path) -> str:
    """Return the digest that names a file in a hub's cache, or "" if the file is not a link into one."""
    if not path.is_symlink():
        return ""
    target = path.resolve(strict=True)
    return target.name if target.parent.name == "blobs" and _BLOB.fullmatch(target.name) else ""


def _state(seen: os.stat_result) -> list[int]:
    return [seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns]


class _Store:
    """The known digests, one entry per file. Threads and processes may share the store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def open(cls) -> _Store | None:
        try:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            folder = Path(base) / FOLDER
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if why := _not_ours(folder.lstat(), stat.S_ISDIR):
                raise PermissionError(f"{folder}: {why}")
        except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
            logger.warning("the model's fingerprint will be computed again at each start: %s", error)
            return None
        return cls(folder)

    def find(self, seen: os.stat_result) -> str:
        try:
            entry = os.open(self._entry(seen), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return ""
        with os.fdopen(entry, "rb") as file:
            if _not_ours(os.fstat(entry), stat.S_ISREG):
                return ""
            try:
                held: Any = json.loads(file.read(4096))
                state, digest = held["state"], held["sha256"]
            except (ValueError, KeyError, TypeError):
                return ""
        good = state == _state(seen) and isinstance(digest, str) and _BLOB.fullmatch(digest)
        return digest if good else ""

    def keep(self, seen: os.stat_result, digest: str) -> None:
        entry = self._entry(seen)
        fresh = entry.with_name(f"{entry.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            fresh.write_text(json.dumps({"state": _state(seen), "sha256": digest}))
            fresh.chmod(0o600)
            fresh.replace(entry)
        except OSError as error:
            logger.warning("cannot keep the digest of a model file: %s", error)
            with suppress(OSError):
                fresh.unlink()

    @contextmanager
    def turn(self, seen: os.stat_result) -> Iterator[None]:
        """Wait while another process is hashing this file, but no longer than hashing may take."""
        ends = time.monotonic() + 1 + seen.st_size / SLOWEST
        try:
            lock = os.open(f"{self._entry(seen)}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield
            return
        try:
            while time.monotonic() < ends:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOOK_S)
            yield
        finally:
            os.close(lock)  # releases the lock

    def _entry(self, seen: os.stat_result) -> Path:
        return self._folder / f"{seen.st_dev:x}-{seen.st_ino:x}.json"


def _not_ours(seen: os.stat_result, kind: Any) -> str:
    if not kind(seen.st_mode):
        return "it is something else"
    if seen.st_uid != os.geteuid():
        return "it belongs to another user"
    return "others may write to it" if seen.st_mode & 0o022 else ""


class _Progress:
    """Logs progress if hashing takes long. Thread-safe."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._read = 0
        self._began = time.monotonic()
        self._told = self._began
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._read += count
            if (now := time.monotonic()) - self._told < TELL_S:
                return
            self._told = now
        logger.info("fingerprint of the model: %s so far", self._figures())

    def end(self) -> None:
        if time.monotonic() - self._began >= TELL_S:
            logger.info("fingerprint of the model: %s; it is kept for the next start", self._figures())

    def _figures(self) -> str:
        spent = time.monotonic() - self._began
        read, total = self._read / 1e9, self._total / 1e9
        return f"{read:.1f} GB hashed of {total:.1f}, in {spent:.0f} s, {read / max(spent, 1e-9):.2f} GB/s"
