"""The division of a worker's KV among its ranks, and what a rank pulls from other workers' ranks.

Pipeline stages divide the layers, and the tensor-parallel ranks of each stage divide the heads of its layers.
Two workers may be divided differently, because the compatibility hash covers the whole cache and not its
division.

    heads of a layer     0 1 2 3
    two ranks            0 1|2 3        a single rank takes 0 1 from rank 0 of these, and 2 3 from rank 1
    eight ranks          0|0|1|1|2|2|3|3        fewer heads than ranks: several ranks have the same head

MLA's latent counts as one head, which every rank has. Ranks, and their shards, are numbered stage after
stage. The layers of all stages have one order, by group and then by position, in which they are numbered,
hashed and packed into records.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.kernels.kv_pack import AS_IS, WIRE_DTYPES, scaled_bytes


@dataclass(frozen=True)
class CacheLayer:
    """One layer of a block, with the heads of all ranks: what the compatibility hash compares."""

    name: str
    dtype: str  # torch's name without "torch."
    block_shape: tuple[int, ...]  # [heads, tokens, channels]; one head for MLA
    block_strides: tuple[int, ...]  # elements
    block_bytes: int
    row_width: int  # elements that share a scale when quantised
    heads: int = 0  # KV heads; 0: cannot be divided, so both workers need the same number of ranks
    stretches: int = 1  # pieces of memory per block, each with all heads one after another
    group: int = 0

    @property
    def element_bytes(self) -> int:
        return self.block_bytes // math.prod(self.block_shape)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a block; the rank's whole part if heads cannot be divided."""
        return self.block_bytes // max(1, self.heads)

    def part_bytes(self, heads: int, wire_dtype: str) -> int:
        """Return the bytes of `heads` heads in a record."""
        size = heads * self.head_bytes
        if wire_dtype == AS_IS or self.element_bytes == 1:
            return size
        return scaled_bytes(size // self.element_bytes // self.row_width, self.row_width)


@dataclass(frozen=True)
class Form:
    ranks: int  # tensor-parallel ranks of each stage, one shard each
    wire_dtype: str
    stages: tuple[tuple[int, ...], ...] = ()  # layer numbers of each pipeline stage; (): a single stage

    @property
    def shards(self) -> int:
        return self.ranks * max(1, len(self.stages))

    def layers_of(self, rank: int, layers: int) -> Sequence[int]:
        """Return the numbers of a rank's layers; the model has `layers` of them."""
        return self.stages[rank // self.ranks] if self.stages else range(layers)


@dataclass(frozen=True)
class Division:
    """One of a worker's tensor-parallel ranks, and the heads that the ranks divide."""

    rank: int = 0
    ranks: int = 1
    heads: Mapping[str, int] = field(default_factory=dict)  # layer -> heads of all ranks; 1 for MLA


UNDIVIDED = Division()


@dataclass(frozen=True)
class Cut:
    """A run of heads of one layer, to be copied from a source rank's records to this rank's cache."""

    layer: int
    there: int  # index of the first head on the source rank
    here: int  # index of the first head on this rank
    count: int


@dataclass(frozen=True)
class Share:
    """The heads that one rank takes from one shard of a save."""

    form: Form  # the save's form
    record_bytes: int  # size of the shard's records
    rank: int  # the rank that saved the shard
    cuts: tuple[Cut, ...]  # empty if this rank only releases the shard
    readers: int  # number of ranks of this worker that release the shard


def position(name: str) -> tuple[str | int, ...]:
    """Return a sort key for a layer's name that compares the numbers in it numerically."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name))


def joined(
    stages: Sequence[Sequence[CacheLayer]],
) -> tuple[tuple[CacheLayer, ...], tuple[tuple[int, ...], ...]]:
    """Return the layers of all stages in order, and each stage's layer numbers; () for a single stage."""
    every = itertools.chain.from_iterable(stages)
    layers = tuple(sorted(every, key=lambda layer: (layer.group, position(layer.name))))
    numbers = {layer: number for number, layer in enumerate(layers)}
    found = tuple(tuple(sorted(numbers[layer] for layer in stage)) for stage in stages)
    return layers, found if len(found) > 1 else ()


def heads_of(layer: CacheLayer, ranks: int, rank: int) -> range:
    """Return the heads of a layer that a rank of its stage has, as vLLM divides them."""
    rank %= ranks
    if layer.heads >= ranks:
        each = layer.heads // ranks
        return range(rank * each, (rank + 1) * each)
    head = rank * layer.heads // ranks
    return range(head, head + 1)


def part_bytes(layer: CacheLayer, form: Form, rank: int) -> int:
    return layer.part_bytes(len(heads_of(layer, form.ranks, rank)), form.wire_dtype)


def record_bytes(layers: Sequence[CacheLayer], form: Form, rank: int) -> int:
    """Return the size of a rank's records in bytes: the largest group's size, which all groups use."""
    sizes: dict[int, int] = {}
    for layer in (layers[number] for number in form.layers_of(rank, len(layers))):
        sizes[layer.group] = sizes.get(layer.group, 0) + part_bytes(layer, form, rank)
    return max(sizes.values(), default=0)


def unfit(layers: Sequence[CacheLayer], here: Form, there: Form) -> str:
    """Return why ranks of form `here` cannot load saves of form `there`; empty if they can."""
    if here == there:
        return ""
    if there.wire_dtype not in WIRE_DTYPES:
        return f"KV wire dtype {there.wire_dtype!r} is not known here"
    if there.stages and sorted(itertools.chain(*there.stages)) != list(range(len(layers))):
        return f"the stages of its shards do not have each of {len(layers)} layers once"
    for layer in layers:
        if not layer.heads and there.ranks != here.ranks:
            return f"{there.ranks} shards; layer {layer.name} comes from {here.ranks} ranks or not at all"
        if layer.heads and (not there.ranks or (layer.heads % there.ranks and there.ranks % layer.heads)):
            return f"{there.ranks} shards do not divide the {layer.heads} heads of layer {layer.name}"
    return ""


def shares(
    layers: Sequence[CacheLayer], here: Form, rank: int, there: Form, turn: int = 0
) -> tuple[Share, ...]:
    """Return a rank's shares of a save. turn: selects among source ranks with the same heads."""
    needed = [_needed(layers, here, one, there, turn) for one in range(here.shards)]
    found = []
    for source in range(there.shards):
        readers = [one for one in range(here.shards) if source in needed[one]] or [source % here.shards]
        if rank in readers:
            cuts = tuple(needed[rank].get(source, ()))
            size = record_bytes(layers, there, source)
            found.append(Share(there, size, source, cuts, len(readers)))
    return tuple(found)


def _needed(
    layers: Sequence[CacheLayer], here: Form, rank: int, there: Form, turn: int
) -> dict[int, list[Cut]]:
    found: dict[int, list[Cut]] = {}
    stages = {
        number: first
        for first in range(0, there.shards, there.ranks)
        for number in there.layers_of(first, len(layers))
    }
    # Layers with the most heads first, so that replicated heads come from source ranks already in use.
    for number in sorted(here.layers_of(rank, len(layers)), key=lambda number: -layers[number].heads):
        layer, first = layers[number], stages[number]
        own = heads_of(layer, here.ranks, rank)
        start = own.start
        while start < own.stop:
            stage = range(first, first + there.ranks)
            having = [one for one in stage if start in heads_of(layer, there.ranks, one)]
            used = [one for one in having if one in found]
            if here.ranks == there.ranks:
                source = first + rank % there.ranks
            else:
                source = (used or having)[(rank + turn) % len(used or having)]
            theirs = heads_of(layer, there.ranks, source)
            stop = min(own.stop, theirs.stop)
            cut = Cut(number, start - theirs.start, start - own.start, stop - start)
            found.setdefault(source, []).append(cut)
            start = stop
    return found
