"""Names for a prompt's prefixes, by which the scheduler can send like to like.

The idea of hashing block by block, each hash covering all before it, is vLLM's prefix cache's; the hashes
are not its (nobody looks them up in an engine), so a cheap one does.
"""

from __future__ import annotations

from array import array

import xxhash

MAX_BLOCKS = 256  # hashes a request carries at most: 8 bytes each in every placement


def prefix_hashes(token_ids: list[int], block_size: int, salt: str = "") -> tuple[bytes, ...]:
    """One 8-byte hash a full block of `block_size` tokens, first block first; at most MAX_BLOCKS.

    `salt` keeps apart what may not share a cache.
    """
    data = memoryview(array("I", token_ids)).cast("B")
    step = 4 * block_size
    chain = xxhash.xxh3_64_digest(salt.encode())
    hashes = []
    for begin in range(0, min(len(data) // step, MAX_BLOCKS) * step, step):
        chain = xxhash.xxh3_64_digest(chain + data[begin : begin + step])
        hashes.append(chain)
    return tuple(hashes)
