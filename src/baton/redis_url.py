"""Parse Redis URLs, and show them without passwords. Imports no store's client."""

from __future__ import annotations

from urllib.parse import parse_qs

# As in the library `limits`, which also uses redis-py. redis-py itself has no URLs for the last two.
REDIS = ("redis", "rediss")
SENTINEL = ("redis+sentinel", "rediss+sentinel")
CLUSTER = ("redis+cluster", "rediss+cluster")
KINDS = "redis://, redis+sentinel:// or redis+cluster://, with rediss for TLS"
FORM = (
    "redis://[[USER]:PASSWORD@]HOST:PORT/DB, redis+sentinel://HOST:PORT,HOST:PORT/MASTER or "
    "redis+cluster://HOST:PORT,HOST:PORT"
)


def is_redis(url: str) -> bool:
    """Return whether this is a Redis URL."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme in (*REDIS, *SENTINEL, *CLUSTER)


def without_password(url: str) -> str:
    """Return the URL without its password, and without options, which may hold one.

    A password that should have been percent-encoded, and so ends the host for a parser, is still recognised.
    """
    scheme, separator, _ = url.partition("://")
    credentials, place = _parts(url)
    user = credentials.partition(":")[0] if ":" in credentials else ""
    return f"{scheme}{separator}{user}{'@' if user else ''}{place.partition('?')[0]}"


def has_password(url: str) -> bool:
    """Return whether the URL has a password, as part of the address or as an option."""
    credentials, place = _parts(url)
    options = parse_qs(place.partition("?")[2])
    return bool(credentials.partition(":")[2]) or "password" in options or "sentinel_password" in options


def _parts(url: str) -> tuple[str, str]:
    """Return the text before the host's @, and the host with everything after it."""
    credentials, _, place = url.partition("://")[2].rpartition("@")
    return credentials, place
