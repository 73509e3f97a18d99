"""Seal pieces of bulk data between two processes that agreed on keys over a connection with TLS.

Python's TLS opens and seals 16 KiB per call, which is too slow for KV (docs/decisions/0061). AES-256-GCM by
`cryptography` takes pieces of any size, with the CPU's own instructions. A key seals one direction of one
connection, and the nonce is the piece's number: pieces that are left out, duplicated, swapped or changed on
their way do not open.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.security.errors import NotAsSealed

KEY_BYTES = 32
TAG_BYTES = 16  # added to each sealed piece
_NONCE_BYTES = 12

Piece = bytes | bytearray | memoryview


def new_key() -> bytes:
    """Return a fresh random key."""
    return secrets.token_bytes(KEY_BYTES)


class Seal:
    """Seal, or open, one direction's pieces in order. Use it from one thread at a time."""

    def __init__(self, key: bytes) -> None:
        """Start with the first piece. Raises ValueError for a key of another length."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes; {KEY_BYTES} are needed")
        self._cipher = AESGCM(key)
        self._pieces = 0

    def seal(self, piece: Piece, into: memoryview, beside: bytes = b"") -> None:
        """Write the next piece to `into`, which is TAG_BYTES longer.

        beside: associated plain text, which must also arrive unchanged.
        """
        self._cipher.encrypt_into(self._nonce(), piece, beside, into)

    def open(self, sealed: Piece, into: memoryview, beside: bytes = b"") -> None:
        """Write the next piece, opened, to `into`. Raises NotAsSealed."""
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, beside, into)
        except InvalidTag:
            raise NotAsSealed(f"piece {self._pieces} of a connection is not what was sent") from None

    def _nonce(self) -> bytes:
        self._pieces += 1
        return self._pieces.to_bytes(_NONCE_BYTES, "little")
