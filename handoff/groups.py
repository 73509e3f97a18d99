"""The groups of a KV cache: layers that keep the same tokens and therefore share block ids.

Most models have one group. Layers with a sliding window, with chunks, or with a state instead of KV form
further groups with blocks of their own. A save has one record per live block, group after group. Groups that
keep all tokens come first, because their full blocks are final, and can be sent, while the prompt is still
being computed. Both ends derive the same numbering of records from the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.protos.handoff_pb2 import Group


def num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


@dataclass(frozen=True)
class CacheGroup:
    """One group's rule for which blocks the next token needs."""

    block_size: int  # tokens
    window: int = 0  # tokens attended to, including the next one; 0: all tokens
    chunk: int = 0  # tokens; attention goes back to the start of the next token's chunk; 0: no chunks
    state: str = ""  # describes the state kept, in one block, instead of tokens' KV; empty if there is none

    def live(self, num_tokens: int) -> range:
        """Return the numbers of the blocks needed to continue after the first `num_tokens`."""
        if self.state:
            return range(min(1, num_tokens))
        stop, left = num_blocks(num_tokens, self.block_size), 0
        if self.window:
            left = max(0, num_tokens - self.window + 1)
        elif self.chunk:
            left = num_tokens // self.chunk * self.chunk
        return range(min(left // self.block_size, stop), stop)

    @property
    def keeps_all(self) -> bool:
        """Whether every token is kept, so that a full block never changes."""
        return not (self.window or self.chunk or self.state)

    def serves(self, saved: int, wanted: int) -> bool:
        """Return whether a save of `saved` tokens can serve the first `wanted`; a state cannot be cut."""
        if self.state:
            return saved == wanted
        return wanted <= saved and self.live(wanted).start >= self.live(saved).start

    def __str__(self) -> str:
        if self.state:
            return self.state
        window = f" in a window of {self.window}" if self.window else ""
        return f"{self.block_size}{window}{f' in chunks of {self.chunk}' if self.chunk else ''}"


@dataclass(frozen=True)
class Part:
    """The cache blocks of one group that belong to consecutive records of a save."""

    group: int
    first: int  # place of the first record in the save
    block_ids: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.first + len(self.block_ids)

    def within(self, first: int, stop: int) -> Part:
        """Return the sub-part at positions `first` to `stop`, which may have no blocks."""
        start = max(first, self.first)
        return Part(self.group, start, self.block_ids[start - self.first : max(0, stop - self.first)])


def serve(groups: Sequence[CacheGroup], saved: int, wanted: int) -> bool:
    return all(group.serves(saved, wanted) for group in groups)


def in_order(groups: Sequence[CacheGroup]) -> list[int]:
    """Return the groups' numbers in the order of their records in a save."""
    return sorted(range(len(groups)), key=lambda number: not groups[number].keeps_all)


def final_records(groups: Sequence[CacheGroup], num_tokens: int) -> int:
    """Return how many leading records of a save are final once `num_tokens` of the prompt are computed."""
    first = groups[in_order(groups)[0]]
    return num_tokens // first.block_size if first.keeps_all else 0


def num_records(groups: Sequence[CacheGroup], num_tokens: int) -> int:
    return sum(len(group.live(num_tokens)) for group in groups)


def described(groups: Sequence[CacheGroup], num_tokens: int) -> list[Group]:
    found = []
    for group in groups:
        live = group.live(num_tokens)
        found.append(Group(block_size=group.block_size, first_block=live.start, num_blocks=len(live)))
    return found


def saved_parts(
    groups: Sequence[CacheGroup], tables: Sequence[Sequence[int]], num_tokens: int
) -> tuple[Part, ...]:
    """Return the parts of a save after `num_tokens` tokens. tables: a request's blocks, by group."""
    return loaded_parts(groups, tables, num_tokens, num_tokens, 0)


def loaded_parts(
    groups: Sequence[CacheGroup], tables: Sequence[Sequence[int]], saved: int, wanted: int, have: int
) -> tuple[Part, ...]:
    """Return the parts, of a save of `saved` tokens, that `wanted` tokens need if `have` are cached."""
    parts, place = [], 0
    for number in in_order(groups):
        group, table = groups[number], tables[number]
        there, here = group.live(saved), group.live(wanted)
        start = here.start if group.state else max(here.start, have // group.block_size)
        block_ids = tuple(table[start : here.stop])
        if block_ids:
            parts.append(Part(number, place + start - there.start, block_ids))
        place += len(there)
    return tuple(parts)


def final_part(groups: Sequence[CacheGroup], tables: Sequence[Sequence[int]], first: int, stop: int) -> Part:
    """Return the part at positions `first` to `stop`, which must be among the `final_records`."""
    number = in_order(groups)[0]
    return Part(number, first, tuple(tables[number][first:stop]))


def parts_from(parts: Sequence[Part], first: int) -> tuple[Part, ...]:
    found = (part.within(first, part.stop) for part in parts)
    return tuple(part for part in found if part.block_ids)


def runs(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Merge the positions of ordered parts into as few runs (first, stop) as possible."""
    found: list[tuple[int, int]] = []
    for part in parts:
        if found and found[-1][1] == part.first:
            found[-1] = found[-1][0], part.stop
        else:
            found.append((part.first, part.stop))
    return found
