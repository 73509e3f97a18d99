"""The keys of KV blocks, and of images' embeddings.

A key has 56 bits of vLLM's hash of a block, which covers everything that its KV depends on: one look-up in a
billion finds the wrong block, and that request is merely placed less well. The lowest four bits are a level:
how often the block's depth (1 for a prompt's first block) can be halved. Routers send the keys of only every
second, fourth, ... block of a long prompt, and a full index keeps only those levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

REMOVED = 1 << 63  # set in an operation that removes the block
KEYS = 1 << 60  # all keys are below this
MOST_LEVEL = 15
MOST_KEYS = 256  # per prompt

_LEVELS = 0xF  # bits of a name that hold its level
_ABOVE_LEVELS = KEYS - 1 - _LEVELS


def level_of(depth: int) -> int:
    """Return how often a depth of 1 or more can be halved; at most MOST_LEVEL."""
    return min((depth & -depth).bit_length() - 1, MOST_LEVEL)


def key_of(block_hash: int, depth: int) -> int:
    """Return the key of a block from its hash (at least the lowest 64 bits) and depth; below 2**60."""
    return block_hash & _ABOVE_LEVELS | level_of(depth)


def image_key(identifier: str) -> int:
    """Return the key of an image's embeddings from its name, which ends with a hash in hex.

    It has the highest level: a full index keeps it longest.
    """
    return key_of(int(identifier.rpartition(":")[2][-16:], 16), 1 << MOST_LEVEL)


class PromptKeys(NamedTuple):
    """The keys of all blocks of a prompt, or of every n-th block."""

    keys: tuple[int, ...] = ()
    tokens: int = 0  # between two keys


NO_KEYS = PromptKeys()


def prompt_keys(hashes: Sequence[int], block_tokens: int) -> PromptKeys:
    """Return at most MOST_KEYS keys for the hashes of all blocks of a prompt."""
    stride = 1 << max(0, -(-len(hashes) // MOST_KEYS) - 1).bit_length()
    depths = range(stride, len(hashes) + 1, stride)
    return PromptKeys(tuple(key_of(hashes[depth - 1], depth) for depth in depths), stride * block_tokens)
