"""Access to the live page: for holders of its key or, if it has no key, for users of this machine.

A browser sends the key once and gets a cookie. Without a key the page listens on loopback only and answers
only to this machine's own names: another site could point its name here (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.services.router.http.authentication import keys_in

COOKIE = "baton_ops"
ACTION_HEADER = b"x-baton-ops"  # another site would need CORS consent to send it
_OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
FREE_TRIES = 5  # wrong keys before a wait
LONGEST_WAIT_S = 60.0
FORGOTTEN_S = 900.0  # how long an address is remembered after its last wrong key
MOST_ADDRESSES = 4096

Headers = Iterable[tuple[bytes, bytes]]


class PageAccess:
    def __init__(self, key: str) -> None:
        """Admit clients that send `key`; if it is "", users of this machine."""
        self._key = key.encode()
        self.has_key = bool(key)
        self._tries = Tries()
        # A new seal in each process, so that the key is asked for again after a restart.
        self._seal = secrets.token_bytes(32)

    def opens(self, headers: Headers) -> bool:
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
        return keys_in(headers) if self._key else []

    def wait_s(self, host: str, *given: bytes) -> float:
        """Count the keys that a client gave as one try. If it must wait first, only return how long."""
        if wait_s := self._tries.wait_s(host):
            return wait_s
        (self._tries.passed if self.fits(*given) else self._tries.failed)(host)
        return 0.0

    def may_act(self, headers: Headers) -> bool:
        """Return whether a request comes from the page itself, not from another site."""
        return any(name == ACTION_HEADER for name, _ in headers)

    def fits(self, *given: bytes) -> bool:
        """Return whether exactly one key was given and is right: a request counts as one try."""
        return (
            bool(self._key) and len(given) == 1 and hmac.compare_digest(_digest(*given), _digest(self._key))
        )

    def cookie(self) -> str:
        """Return the cookie of clients that have shown the key."""
        return hmac.new(self._seal, self._key, hashlib.sha256).hexdigest()


@dataclass(slots=True)
class _Address:
    wrong: int
    last: float  # time of the last wrong key
    until: float  # when keys from this address are checked again


class Tries:
    """Counts wrong keys by address; for IPv6 by /64 network, because one client may own a whole network.

    After a few, keys from that address are ignored for a time that doubles with each further wrong key. While
    the table is full, no new address may try.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._addresses: OrderedDict[str, _Address] = OrderedDict()  # ordered by last wrong key

    def __len__(self) -> int:
        return len(self._addresses)

    def wait_s(self, host: str) -> float:
        """Return how long this client must wait; 0 if it may try."""
        now = self._now_s()
        self._forget(now)
        found = self._addresses.get(_network(host))
        if found is not None:
            return max(0.0, found.until - now)
        return 1.0 if len(self._addresses) >= MOST_ADDRESSES else 0.0

    def failed(self, host: str) -> None:
        now, network = self._now_s(), _network(host)
        found = self._addresses.pop(network, None) or _Address(0, now, now)
        found.wrong += 1
        found.last = now
        if found.wrong > FREE_TRIES:
            found.until = now + min(LONGEST_WAIT_S, 2.0 ** (found.wrong - FREE_TRIES - 1))
        if len(self._addresses) < MOST_ADDRESSES:
            self._addresses[network] = found

    def passed(self, host: str) -> None:
        """Forget the wrong keys of a client that sent the right one."""
        self._addresses.pop(_network(host), None)

    def _forget(self, now: float) -> None:
        while self._addresses:
            network, eldest = next(iter(self._addresses.items()))
            if now < eldest.last + FORGOTTEN_S:
                return
            del self._addresses[network]


def _network(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False))


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
