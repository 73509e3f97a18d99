"""The KV cache of a simulated engine: blocks in use, and idle blocks that form the prefix cache.

As in vLLM, full blocks have hashes and idle ones are evicted when room is needed: least recently used first,
and the last block of a prompt before the others. Changes are collected for the worker's block log, like a
real engine's events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.block_log import Change
from baton.prefix_keys import key_of


@dataclass(slots=True)
class Held:
    """The blocks of one request: hashed ones in order, and the number of others."""

    named: list[int] = field(default_factory=list)  # hashes
    private: int = 0


class Cache:
    """Holds at most `blocks` blocks, unless those in use exceed it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.grown = 0  # blocks of outputs, counted by the engine for all decoding requests
        self._used: dict[int, int] = {}  # hash -> number of requests that hold it
        self._idle: OrderedDict[int, int] = OrderedDict()  # hash -> depth, least recently used first
        self._private = 0
        self._stored: dict[int, int] = {}  # hash -> depth, since the last `take_changes`
        self._removed: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Blocks not in use, idle ones included; negative if outputs have outgrown the cache."""
        return self.blocks - len(self._used) - self._private - self.grown

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._used or block_hash in self._idle

    def hit(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks are in the cache."""
        used, idle = self._used, self._idle
        return next((at for at, one in enumerate(hashes) if one not in used and one not in idle), len(hashes))

    def fits(self, hashes: Sequence[int], blocks: int) -> bool:
        """Return whether there is room for a request of `blocks` blocks that shares `hashes`."""
        return blocks - sum(one in self._used for one in hashes) <= self.free

    def take(self, hashes: Sequence[int], blocks: int) -> Held:
        """Allocate `blocks` blocks for a request, of which `hashes` are cached."""
        for one in hashes:
            self._idle.pop(one, None)
            self._used[one] = self._used.get(one, 0) + 1
        held = Held(list(hashes), max(0, blocks - len(hashes)))
        self._private += held.private
        self.trim()
        return held

    def name(self, held: Held, hashes: Sequence[int], upto: int) -> None:
        """Register a request's first `upto` blocks, which are full, by their hashes."""
        named = held.named
        for depth in range(len(named) + 1, upto + 1):
            one = hashes[depth - 1]
            users = self._used.get(one, 0)
            self._used[one] = users + 1
            if not users and self._idle.pop(one, None) is None:
                self._note(one, depth)
            named.append(one)
            if held.private:
                held.private -= 1
                self._private -= 1

    def release(self, held: Held, hashes: Sequence[int] = (), upto: int = 0) -> None:
        """Free a request's blocks; the first `upto` of `hashes` become idle, the others are dropped."""
        self._private -= held.private
        held.private = 0
        named = held.named
        for depth in range(max(upto, len(named)), 0, -1):
            if depth > len(named):
                one, users = hashes[depth - 1], 0
                if one in self._used:
                    continue
                if one not in self._idle:
                    self._note(one, depth)
            else:
                one = named[depth - 1]
                users = self._used[one] - 1
            if users:
                self._used[one] = users
                continue
            self._used.pop(one, None)
            self._idle[one] = depth
            self._idle.move_to_end(one)
        held.named = []
        self.trim()

    def trim(self) -> None:
        """Evict idle blocks until the cache is within its size."""
        most = max(0, self.free)
        while len(self._idle) > most:
            one, depth = self._idle.popitem(last=False)
            if self._stored.pop(one, None) is None:
                self._removed[one] = depth

    def take_changes(self) -> Change:
        """Return what was stored and removed since the last call."""
        change = Change(
            removed=[key_of(one, depth) for one, depth in self._removed.items()],
            stored=[key_of(one, depth) for one, depth in self._stored.items()],
        )
        self._stored, self._removed = {}, {}
        return change

    def _note(self, one: int, depth: int) -> None:
        if self._removed.pop(one, None) is None:
            self._stored[one] = depth
