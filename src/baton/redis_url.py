"""Recognise Redis URLs, and show them without passwords. Does not import redis."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, unquote

# The schemes of the library `limits`; redis-py itself has none for Sentinels and clusters.
REDIS = ("redis", "rediss")
SENTINEL = ("redis+sentinel", "rediss+sentinel")
CLUSTER = ("redis+cluster", "rediss+cluster")
KINDS = "redis://, redis+sentinel:// or redis+cluster://, with rediss for TLS"
PASSWORD_FILE = "password_file"  # noqa: S105 (an option of the URL, for Baton alone)
_FILE = re.compile(rf"([?&]){PASSWORD_FILE}=([^&]*)(?:&|$)")  # its path may contain an @
FORM = (
    "redis://[[USER]:PASSWORD@]HOST:PORT/DB, redis+sentinel://HOST:PORT,HOST:PORT/MASTER or "
    "redis+cluster://HOST:PORT,HOST:PORT"
)


def not_a_url(key: str) -> str:
    """Return the error for a setting that is not a Redis URL; its value may be a password."""
    return (
        f"{key} is not a Redis URL: it must look like {FORM}, with the password percent-encoded or in a file "
        f"(?{PASSWORD_FILE}=FILE at the end)"
    )


def is_redis(url: str) -> bool:
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme in (*REDIS, *SENTINEL, *CLUSTER)


def without_password(url: str) -> str:
    """Return the URL without its password and its options, which may contain one.

    Unlike urlsplit, this also finds a password with special characters that are not percent-encoded.
    """
    scheme, separator, _ = url.partition("://")
    credentials, place = _parts(url)
    user = credentials.partition(":")[0] if ":" in credentials else ""
    return f"{scheme}{separator}{user}{'@' if user else ''}{place.partition('?')[0]}"


def has_password(url: str) -> bool:
    """Return whether the URL has a password, before the host or as an option."""
    credentials, place = _parts(url)
    options = parse_qs(place.partition("?")[2])
    return bool(credentials.partition(":")[2]) or "password" in options or "sentinel_password" in options


def password_file(url: str) -> str:
    """Return the path of the file with the URL's password, or ""."""
    found = _FILE.search(url)
    return unquote(found[2]) if found else ""


def _parts(url: str) -> tuple[str, str]:
    credentials, _, place = _FILE.sub(r"\1", url).partition("://")[2].rpartition("@")
    return credentials, place
