"""Addresses as `host:port` text."""

from __future__ import annotations

import ipaddress
import socket

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (wildcard -> the address that reaches it)


def split(address: str) -> tuple[str, int]:
    """Split into host (an IPv6 one without brackets) and port (0 if absent). Raises ValueError."""
    text = address.strip()
    host, colon, port = text.rpartition(":")
    if not colon or _is_ip(_bare(text)):
        host, port = text, "0"
    host = _bare(host)
    known = _is_ip(host) or (host and not set("[]: ").intersection(host))
    if not known or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)


def join(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Return whether `host` means all addresses of a machine. It cannot be dialled."""
    return host in _LOOPBACK


def from_here(address: str) -> str:
    """Return the address that a process on the same machine should dial. Raises ValueError."""
    host, port = split(address)
    return join(_LOOPBACK.get(host, host), port)


def unmapped(host: str) -> str:
    """Turn an IPv4-mapped IPv6 address (::ffff:192.0.2.1) into an IPv4 one; return others unchanged."""
    return host[7:] if host.startswith("::ffff:") and "." in host else host


def listen(host: str, port: int, backlog: int = 128, *, shared: bool = False) -> socket.socket:
    """Return a listening TCP socket; `shared` lets other sockets of this user listen on the same port.

    `::` means both address families, as in gRPC. Raises OSError.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        (host, port), family=family, backlog=backlog, reuse_port=shared, dualstack_ipv6=both
    )


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
