"""Hashes of a prompt's prefixes, by which the scheduler can send requests to where a prefix is cached.

As in vLLM's prefix cache there is one hash per block, each over all tokens up to its end. They need not be
vLLM's own hashes, as they are not looked up in an engine: a cheap function is enough.
"""

from __future__ import annotations

from array import array

import xxhash

MAX_BLOCKS = 256  # at most so many hashes per request: 8 bytes each in every placement


def prefix_hashes(token_ids: list[int], block_size: int, salt: str = "") -> tuple[bytes, ...]:
    """Return one 8-byte hash per full block of `block_size` tokens, first block first; at most MAX_BLOCKS.

    `salt` keeps requests apart that may not share a cache.
    """
    data = memoryview(array("I", token_ids)).cast("B")
    step = 4 * block_size
    chain = xxhash.xxh3_64_digest(salt.encode())
    hashes = []
    for begin in range(0, min(len(data) // step, MAX_BLOCKS) * step, step):
        chain = xxhash.xxh3_64_digest(chain + data[begin : begin + step])
        hashes.append(chain)
    return tuple(hashes)
