"""The names of KV blocks.

A block's hash in vLLM covers all tokens up to its end, the salt of its cache and whatever else its KV depends
on, so equal names mean equal KV. 56 bits of it are kept: among 100 million blocks one look-up in a billion
meets another block of the same name, and the only harm is a request that is placed less well.

The lowest four bits tell how often the block's depth (1 for a prompt's first block) can be halved. They
distinguish blocks at multiples of 2, 4, 8, ...: a router names only every second, fourth, ... block of a long
prompt, and a full index keeps only those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

REMOVED = 1 << 63  # set in an operation that removes the block
MOST_LEVEL = 15
MOST_KEYS = 256  # per prompt

_LEVELS = 0xF  # bits of a name that hold its level
_ABOVE_LEVELS = (1 << 60) - 1 - _LEVELS


def level_of(depth: int) -> int:
    """Return how often a depth of 1 or more can be halved; at most MOST_LEVEL."""
    return min((depth & -depth).bit_length() - 1, MOST_LEVEL)


def key_of(block_hash: int, depth: int) -> int:
    """Return the name of the block with this hash, or its lowest 64 bits, at this depth; below 2**60."""
    return block_hash & _ABOVE_LEVELS | level_of(depth)


class PromptKeys(NamedTuple):
    """Hold the names of a prompt's blocks: of all of them, or of every n-th."""

    keys: tuple[int, ...] = ()
    tokens: int = 0  # distance between two names, and up to the first one


NO_KEYS = PromptKeys()


def prompt_keys(hashes: Sequence[int], block_tokens: int) -> PromptKeys:
    """Name the blocks of a prompt, at most MOST_KEYS, from the hashes of all of them in order."""
    stride = 1 << max(0, -(-len(hashes) // MOST_KEYS) - 1).bit_length()
    depths = range(stride, len(hashes) + 1, stride)
    return PromptKeys(tuple(key_of(hashes[depth - 1], depth) for depth in depths), stride * block_tokens)
