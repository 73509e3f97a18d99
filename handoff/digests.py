"""Digests of KV: XXH3-64, seeded so that equal bytes of two requests, or of two attempts at one, differ.

Not against forgery (the network between workers is trusted), but against truncation, reuse of memory and
mix-ups. XXH3 reads 18 GB/s on one core of an AMD EPYC, as fast as memory: 11.4 MB in 0.6 ms.
"""

from __future__ import annotations

import xxhash

from baton.handoff.segments import Bytes


def seed(request_id: str, epoch: int) -> int:
    """Of one attempt at one request; 64 bits, never 0."""
    return int(xxhash.xxh3_64_intdigest(request_id.encode(), seed=epoch & 0xFFFF_FFFF_FFFF_FFFF)) or 1


def of_records(records: Bytes, seed_value: int) -> list[int]:
    """One digest a record. records: [blocks, record_bytes] uint8, each record contiguous."""
    return [int(xxhash.xxh3_64_intdigest(record.data, seed=seed_value)) for record in records]
