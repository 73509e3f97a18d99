"""Encrypt bulk data between two processes that agreed on keys over a TLS connection, with AES-256-GCM.

Each direction has its own key, and the nonce is the piece's number. Python's TLS encrypts 16 KiB per call and
took 1.5 to 1.7 CPU seconds per GB; hosts may lack the kernel's TLS.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.security.errors import NotAsSealed

KEY_BYTES = 32
TAG_BYTES = 16  # added to each piece
_NONCE_BYTES = 12

Piece = bytes | bytearray | memoryview


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


class Seal:
    """Encrypt or decrypt the pieces of one direction, in order. Not thread-safe."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key has {len(key)} bytes, not {KEY_BYTES}")
        self._cipher = AESGCM(key)
        self._pieces = 0

    def seal(self, piece: Piece, into: memoryview, beside: bytes = b"") -> None:
        """Encrypt the next piece into `into`, which is TAG_BYTES longer.

        beside: associated plain text, which is authenticated as well.
        """
        self._cipher.encrypt_into(self._nonce(), piece, beside, into)

    def open(self, sealed: Piece, into: memoryview, beside: bytes = b"") -> None:
        """Decrypt the next piece into `into`. Raises NotAsSealed."""
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, beside, into)
        except InvalidTag:
            raise NotAsSealed(f"piece {self._pieces} of a connection was modified in transit") from None

    def _nonce(self) -> bytes:
        self._pieces += 1
        return self._pieces.to_bytes(_NONCE_BYTES, "little")
