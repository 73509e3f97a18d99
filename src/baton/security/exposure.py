"""Without TLS, processes must not listen where other machines can reach them."""

from __future__ import annotations

import ipaddress
import socket

from baton.security.errors import NotSecured


def check(key: str, host: str) -> None:
    """Raise NotSecured for a host that other machines can reach; `key`: its setting."""
    if not only_from_here(host):
        raise NotSecured(
            f"{key}: {host or 'all addresses'} can be reached from other machines, and nothing there is "
            "encrypted or authenticated: turn security.tls on (docs/security.md), or set security.insecure "
            "where the network itself is trusted"
        )


def only_from_here(host: str) -> bool:
    """Return whether the host has only loopback addresses, or cannot be resolved."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host or "::", None)}
    except OSError:
        return True
    return all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found)
