"""Digests of KV records, seeded so that equal bytes in different requests, attempts or places differ.

They protect against truncation, reuse of memory and mix-ups, not against forgery: that is TLS's job
(docs/security.md). A record's own digest is computed where the record is packed, on a GPU too (the maths is
in kernels/kv_pack/README.md). The seed of the attempt and the record's place in the prompt are added to it,
so that KV saved for another request, or another part of the text, never passes, even with its own digest.
"""

from __future__ import annotations

import numpy as np
import xxhash

from baton.handoff.errors import DigestMismatch
from baton.handoff.records import Bytes, Digests
from baton.kernels import kv_pack

_STRIDE = np.uint64(0x9E37_79B9_7F4A_7C15)  # odd, so that multiples are distinct modulo 2**64


def seed(request_id: str, epoch: int) -> int:
    """Return the 64-bit seed of one attempt at one request, never 0."""
    return int(xxhash.xxh3_64_intdigest(request_id.encode(), seed=epoch & 0xFFFF_FFFF_FFFF_FFFF)) or 1


def of_message(serialized: bytes) -> int:
    """Return the 64-bit digest of a message in its wire form."""
    return int(xxhash.xxh3_64_intdigest(serialized))


def seeded(own: Digests, seed_value: int, first_block: int) -> Digests:
    """Add the seed to the digests of consecutive records, from block `first_block` on: [n], modulo 2**64.

    own: their digests without a seed, [n].
    """
    places = np.arange(first_block, first_block + len(own), dtype=np.uint64)
    return own + np.uint64(seed_value) + places * _STRIDE


def of_records(records: Bytes, seed_value: int, first_block: int) -> Digests:
    """Compute the digests of consecutive records: [n].

    records: [n, record_bytes] uint8 in host memory, each a whole number of 8-byte words.
    """
    own = np.empty(len(records), np.uint64)
    kv_pack.digest(records, own)
    return seeded(own, seed_value, first_block)


def compare(what: str, first_block: int, came: Digests, saved: Digests) -> None:
    """Raise DigestMismatch, naming the first block that differs, unless all digests are equal."""
    wrong = came != saved
    if wrong.any():
        bad = int(wrong.argmax())
        raise DigestMismatch(
            f"{what}: block {first_block + bad} came with digest {came[bad]:016x}; it was saved with"
            f" {saved[bad]:016x}"
        )
