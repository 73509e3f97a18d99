"""The door of the live page. It lets in holders of the page's key; without a key, users of this machine.

A browser shows the key once, at /ops/login, and then a cookie that no script reads and no other site sends.
Without a key the page listens on loopback only, and answers to this machine's own names only: another site's
page could lead its name here (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from baton.services.router.http import presented

COOKIE = "baton_ops"
ACTION_HEADER = b"x-baton-ops"  # another site's page needs CORS consent to send it, which it never gets
_OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")

Headers = Iterable[tuple[bytes, bytes]]


class Door:
    """The check of each request to the live page."""

    def __init__(self, key: str) -> None:
        """Let in clients that show `key`; "" lets in this machine's users."""
        self._key = key.encode()
        # New in each process: a restart asks for the key again.
        self._seal = secrets.token_bytes(32)

    @property
    def has_key(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._key)

    def opens(self, headers: Headers) -> bool:
        """Return whether a request with these headers may see the page."""
        found = dict(headers)
        if not self._key:
            return _host(found.get(b"host", b"")) in _OWN_NAMES
        if self.fits(*self.shown(headers)):
            return True
        return any(
            hmac.compare_digest(one, self.cookie().encode()) for one in _cookies(found.get(b"cookie", b""))
        )

    def shown(self, headers: Headers) -> list[bytes]:
        """Return the keys in a request's headers, right or wrong; none if no key is needed."""
        return presented.keys_in(headers) if self._key else []

    def may_act(self, headers: Headers) -> bool:
        """Return whether a request comes from the page itself, and not from another site's."""
        return any(name == ACTION_HEADER for name, _ in headers)

    def fits(self, *given: bytes) -> bool:
        """Return whether the right key was given and no other, because a request is one try."""
        return (
            bool(self._key) and len(given) == 1 and hmac.compare_digest(_digest(*given), _digest(self._key))
        )

    def cookie(self) -> str:
        """Return the cookie for clients that have shown the key."""
        return hmac.new(self._seal, self._key, hashlib.sha256).hexdigest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _host(value: bytes) -> str:
    text = value.decode("latin-1")
    return text.rpartition(":")[0] if ":" in text.rpartition("]")[2] else text


def _cookies(value: bytes) -> Iterable[bytes]:
    for part in value.split(b";"):
        name, _, found = part.strip().partition(b"=")
        if name == COOKIE.encode():
            yield found
