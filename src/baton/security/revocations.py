"""Revoked certificates and tokens, in a file that `baton ca revoke` and `baton ca serve` share.

A line is a certificate and its renewals. Revoking a name affects certificates issued so far, not later joins.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from baton.security.errors import IdentityError, JoinRefused
from baton.security.identity import kept_json
from baton.security.names import Name

_SERIAL = re.compile(r"[0-9a-f]{14,40}")  # longer than a token's id


class Revocations:
    """The CA's list of revocations, read at each renewal."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, what: str) -> str:
        """Revoke a serial number or a SPIFFE id; return it in the form of `listed`.

        Raises IdentityError for anything else, and AuthorityError.
        """
        what = listed(what)
        self._add(what)
        return what

    def add_token(self, token_id: str) -> None:
        """Revoke a token by its id. Raises AuthorityError."""
        self._add(token_id)

    def all(self) -> dict[str, float]:
        """Return all revocations with their times (wall clock, seconds). Raises AuthorityError."""
        with self._lock() as found:
            return found

    @contextlib.contextmanager
    def allowing(self, name: Name, line: str, issued: float) -> Iterator[None]:
        """Lock the list while a certificate is renewed. Raises JoinRefused if that was revoked."""
        with self._lock() as found:
            if line in found or found.get(name.uri, 0.0) >= issued:
                raise JoinRefused(f"the certificate of {name} was revoked: join with a token again")
            yield

    def _add(self, what: str) -> None:
        with self._lock() as found:
            found[what] = time.time()  # under the lock, so renewals that preceded it have earlier times

    def _lock(self) -> AbstractContextManager[dict[str, float]]:
        return kept_json(self._path, "revocations", float)


def listed(what: str) -> str:
    """Normalize a serial number, as openssl or a log shows it, or a SPIFFE id. Raises IdentityError."""
    if what.startswith("spiffe:"):
        return Name.parse(what).uri
    serial = what.replace(":", "").lower().lstrip("0")
    if not _SERIAL.fullmatch(serial):
        raise IdentityError(
            f"{what!r} is neither a token's id, nor a certificate's serial number in hex, nor a SPIFFE id "
            "(spiffe://baton/TOPIC/ROLE, of a worker with /ID)"
        )
    return serial
