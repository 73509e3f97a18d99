"""The API keys that a request presents.

OpenAI's clients send `Authorization: Bearer KEY`, Anthropic's `x-api-key: KEY`; both work on every path.
"""

from __future__ import annotations

from collections.abc import Iterable

_BEARER = b"bearer"


def keys_in(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the distinct keys in a request's headers."""
    found: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            key = key.strip() if scheme.lower() == _BEARER else b""
        elif name == b"x-api-key":
            key = value.strip()
        else:
            continue
        if key and key not in found:
            found.append(key)
    return found
