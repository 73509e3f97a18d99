"""The wait after wrong keys: keys from an address are ignored for a time that doubles with each wrong one.

The table is bounded. While it is full, no new address may try.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

FREE = 5  # wrong keys without a wait
LONGEST_S = 60.0
FORGOTTEN_S = 900.0  # after an address's last wrong key
MOST = 4096  # addresses


@dataclass(slots=True)
class _Address:
    wrong: int
    last: float  # time of the last wrong key
    until: float  # when its keys count again


class Tries:
    """Counts wrong keys by address; for IPv6 by /64 network, because one client may own all of it."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic, most: int = MOST) -> None:
        self._now_s = now_s
        self._most = most
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
        return 1.0 if len(self._addresses) >= self._most else 0.0

    def failed(self, host: str) -> None:
        now, network = self._now_s(), _network(host)
        found = self._addresses.pop(network, None) or _Address(0, now, now)
        found.wrong += 1
        found.last = now
        if found.wrong > FREE:
            found.until = now + min(LONGEST_S, 2.0 ** (found.wrong - FREE - 1))
        if len(self._addresses) < self._most:
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
