"""The key book in a YAML file (or JSON, which is YAML)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml

from baton.home import expanded
from baton.services.errors import NOT_YAML
from baton.services.tenants.model import Book, BookError, book_of

# libyaml's loader is ten times as fast, and a thousand keys are 100 kB.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DATE = "tag:yaml.org,2002:timestamp"


class _Plain(_Loader):
    """Reads dates as text: `2024-02-30` is a name, not a day."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in known if tag != _DATE]
        for first, known in _Loader.yaml_implicit_resolvers.items()
    }


class FileBook:
    """The key book in a file."""

    def __init__(self, path: str) -> None:
        self.place = f"{path!r} (router.keys_file)"
        self._path = expanded(path, "router.keys_file")
        self._seen: tuple[int, ...] | None = None  # the file's signature when it was last read

    def read(self) -> Book:
        try:
            content = yaml.load(self._path.read_text(encoding="utf-8"), Loader=_Plain)  # noqa: S506 (safe)
        except OSError as error:
            raise BookError(f"{self.place}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise BookError(f"{self.place}: not a text file in UTF-8") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f": line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise BookError(f"{self.place}: not valid YAML{where}") from None
        except NOT_YAML:  # without its message, which may quote a secret
            raise BookError(f"{self.place}: not valid YAML: a value does not match its tag") from None
        try:
            return book_of({} if content is None else content)
        except BookError as error:
            raise BookError(f"{self.place}: {error}") from None

    async def changed(self) -> Book | None:
        """Return the book if its file changed since the last call. Raises BookError once per bad edit."""
        seen = self._signature()
        if seen is not None and seen == self._seen:
            return None
        self._seen = seen
        return await asyncio.to_thread(self.read)

    async def edit(self, change: Callable[[Book], Book]) -> None:
        """Change the book atomically; comments in the file are lost. Raises BookError."""
        await asyncio.to_thread(self._edit, change)

    async def close(self) -> None:
        """Do nothing: the file is not kept open."""

    def _edit(self, change: Callable[[Book], Book]) -> None:
        target = Path(os.path.realpath(self._path))
        try:
            with _locked(target.parent):
                book = change(self.read() if target.exists() else Book())
                _replace(target, yaml.safe_dump(book.model_dump(exclude_defaults=True), sort_keys=False))
        except OSError as error:
            raise BookError(f"{self.place}: cannot be written: {error.strerror}") from None

    def _signature(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _replace(target: Path, text: str) -> None:
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
    written, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(written, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
        Path(name).replace(target)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
