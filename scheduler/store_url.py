"""The part of a store's URL that may be shown. Imports no client of any store."""

from __future__ import annotations

from urllib.parse import parse_qs


def without_password(url: str) -> str:
    """Return the URL as it may be shown: no password, and none of the options, which may hold one.

    A password that should have been percent-encoded, and so ends the host for a parser, is taken for one
    here all the same.
    """
    scheme, separator, _ = url.partition("://")
    credentials, place = _parts(url)
    user = credentials.partition(":")[0] if ":" in credentials else ""
    return f"{scheme}{separator}{user}{'@' if user else ''}{place.partition('?')[0]}"


def has_password(url: str) -> bool:
    """Return whether a password is in it, as part of the address or as an option."""
    credentials, place = _parts(url)
    return bool(credentials.partition(":")[2]) or "password" in parse_qs(place.partition("?")[2])


def _parts(url: str) -> tuple[str, str]:
    """Return the text before the host's @, and the host with all that follows."""
    credentials, _, place = url.partition("://")[2].rpartition("@")
    return credentials, place
