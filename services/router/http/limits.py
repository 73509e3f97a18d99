"""Limits for every client: on headers, on bodies, and on connections (as the file descriptors allow)."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

from baton.services.router.errors import Overloaded, RequestFailed, TooLarge, UnreadableBody

log = logging.getLogger(__name__)

# Connections above the limit that may wait for their 503. Any further one is dropped to save descriptors.
SPARE_CONNECTIONS = 256
OWN_DESCRIPTORS = 512  # reserved for workers, scheduler and files
MAX_HEADER_BYTES = 64 << 10  # including the request's first line
RETRY_AFTER_S = 1.0


MAX_CONNECTIONS = 4_096  # connections to one process of a router


@dataclass(frozen=True)
class HttpLimits:
    """The limits of a server; those of the router and of the live page differ."""

    max_body: int  # bytes
    max_connections: int
    slow_client_s: float
    keep_alive_s: float  # the longest pause between two requests
    of_router: bool = True  # whether refusals name the router's settings


def affordable_connections(wanted: int) -> int:
    """Raise the limit of file descriptors if needed; return how many of the `wanted` connections it allows.

    Without a free descriptor the router could neither accept clients nor reach workers.
    """
    others = SPARE_CONNECTIONS + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + others:
        soft = min(wanted + others, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fits = max(1, min(wanted, soft - others))
    if fits < wanted:
        log.warning(
            "%d connections are wanted, but %d file descriptors (ulimit -n) allow only %d",
            wanted,
            soft,
            fits,
        )
    return fits


def objection(
    limits: HttpLimits, headers: Iterable[tuple[bytes, bytes]], connections: int
) -> RequestFailed | None:
    """Return the error that refuses a request with these headers, or None."""
    for name, value in headers:
        if name == b"content-length" and int(value) > limits.max_body:
            return too_large(limits)
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            coding = value.decode("latin-1")
            why = f"Content-Encoding {coding!r} is not supported: send the body uncompressed"
            return UnreadableBody(why, b"accept-encoding: identity")
        if name == b"content-type" and limits.of_router and not _is_json(value):
            kind = value.decode("latin-1")
            why = f"Content-Type {kind!r} is not supported: send 'application/json'"
            return UnreadableBody(why, b"accept: application/json")
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            why = f"Transfer-Encoding {value.decode('latin-1')!r} is not supported: only 'chunked' is"
            return RequestFailed(why, status=HTTPStatus.NOT_IMPLEMENTED)
    if connections > limits.max_connections:
        return Overloaded(
            f"there are {limits.max_connections} connections already",
            RETRY_AFTER_S,
        )
    return None


def too_large(limits: HttpLimits) -> TooLarge:
    mib = limits.max_body / (1 << 20)
    return TooLarge(f"the request's body exceeds {mib:g} MiB{_named(limits, 'max_body_mib')}")


def too_many_bodies(limits: HttpLimits, in_all: int) -> Overloaded:
    """Refuse a body for which there is no room; all bodies together may have `in_all` bytes."""
    return Overloaded(
        f"the bodies of all requests exceed {in_all / (1 << 20):g} MiB"
        f"{_named(limits, 'max_body_mib', f'{in_all // limits.max_body} times ')}",
        RETRY_AFTER_S,
    )


def too_many_headers() -> RequestFailed:
    """Refuse too many headers, trailers, chunk extensions or empty lines."""
    why = f"the request's headers exceed {MAX_HEADER_BYTES} bytes"
    return RequestFailed(why, status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)


def _is_json(value: bytes) -> bool:
    return value.partition(b";")[0].strip().lower() in (b"", b"application/json")


def _named(limits: HttpLimits, key: str, before: str = "") -> str:
    return f" ({before}router.{key})" if limits.of_router else ""
