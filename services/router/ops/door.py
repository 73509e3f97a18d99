"""Access to the live page: for holders of its key or, without a key, for users of this machine.

A browser shows the key once, at /ops/login, and gets a cookie that scripts cannot read and other sites do not
send. Without a key the page listens on loopback only and answers only to this machine's own names: another
site could point its name here (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from baton.services.router.http import presented

COOKIE = "baton_ops"
ACTION_HEADER = b"x-baton-ops"  # another site would need CORS consent to send it
_OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")

Headers = Iterable[tuple[bytes, bytes]]


class Door:
    """Checks each request to the live page."""

    def __init__(self, key: str) -> None:
        """Admit clients that show `key`; "": users of this machine."""
        self._key = key.encode()
        # New in each process: after a restart the key is asked for again.
        self._seal = secrets.token_bytes(32)

    @property
    def has_key(self) -> bool:
        return bool(self._key)

    def opens(self, headers: Headers) -> bool:
        """Return whether a request may see the page."""
        found = dict(headers)
        if not self._key:
            return _host(found.get(b"host", b"")) in _OWN_NAMES
        if self.fits(*self.shown(headers)):
            return True
        return any(
            hmac.compare_digest(one, self.cookie().encode()) for one in _cookies(found.get(b"cookie", b""))
        )

    def shown(self, headers: Headers) -> list[bytes]:
        """Return the keys in a request's headers; none if the page has no key."""
        return presented.keys_in(headers) if self._key else []

    def may_act(self, headers: Headers) -> bool:
        """Return whether a request comes from the page itself, not from another site."""
        return any(name == ACTION_HEADER for name, _ in headers)

    def fits(self, *given: bytes) -> bool:
        """Return whether exactly one key was given, the right one: a request is one try."""
        return (
            bool(self._key) and len(given) == 1 and hmac.compare_digest(_digest(*given), _digest(self._key))
        )

    def cookie(self) -> str:
        """Return the cookie of clients that have shown the key."""
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
