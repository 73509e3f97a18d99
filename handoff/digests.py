"""Digests of KV records.

They detect truncation, reused memory and mix-ups. Protection against forgery is TLS's job (docs/security.md).
A record is digested where it is packed, on a GPU too (kernels/kv_pack/README.md has the maths). The attempt's
seed and the record's index in the prompt are added to this digest, so KV of another request, attempt or part
of the prompt never passes, even with its own valid digest.
"""

from __future__ import annotations

import numpy as np
import xxhash

from baton.handoff.errors import DigestMismatch
from baton.handoff.records import Bytes, Digests
from baton.kernels import kv_pack

_STRIDE = np.uint64(0x9E37_79B9_7F4A_7C15)  # odd, so that multiples are distinct modulo 2**64


def seed(request_id: str, epoch: int) -> int:
    """Return an attempt's 64-bit seed, never 0."""
    return int(xxhash.xxh3_64_intdigest(request_id.encode(), seed=epoch & 0xFFFF_FFFF_FFFF_FFFF)) or 1


def of_message(serialized: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(serialized))


def seeded(own: Digests, seed_value: int, first_block: int) -> Digests:
    """Add seed and positions to `own`, the unseeded digests [n] of consecutive records."""
    places = np.arange(first_block, first_block + len(own), dtype=np.uint64)
    return own + np.uint64(seed_value) + places * _STRIDE


def of_records(records: Bytes, seed_value: int, first_block: int) -> Digests:
    """Return the seeded digests [n] of records: [n, record_bytes] uint8, in whole 8-byte words."""
    own = np.empty(len(records), np.uint64)
    kv_pack.digest(records, own)
    return seeded(own, seed_value, first_block)


def compare(what: str, first_block: int, came: Digests, saved: Digests) -> None:
    """Raise DigestMismatch, naming the first block that differs, if any digests differ."""
    wrong = came != saved
    if wrong.any():
        bad = int(wrong.argmax())
        raise DigestMismatch(
            f"{what}: block {first_block + bad} came with digest {came[bad]:016x}; it was saved with"
            f" {saved[bad]:016x}"
        )
