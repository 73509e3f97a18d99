"""The division of a KV cache's heads among a worker's ranks, and what a rank needs of another's.

The compatibility hash covers the whole cache, not its division. Two workers may differ in the latter: a load
joins parts of several ranks, or takes a part of one rank's.

    heads of a layer     0 1 2 3
    two ranks            0 1|2 3        rank 0 of one takes 0 1 from rank 0 of two, and 2 3 from its rank 1
    eight ranks          0|0|1|1|2|2|3|3        fewer heads than ranks: several ranks have the same

MLA's latent is one head, which every rank has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.handoff.layers import CacheLayer
from baton.kernels.kv_pack import WIRE_DTYPES


@dataclass(frozen=True)
class Form:
    """Describe the form in which a worker saves KV."""

    ranks: int  # tensor-parallel ranks: a shard each
    wire_dtype: str


@dataclass(frozen=True)
class Division:
    """Identify one of a worker's tensor-parallel ranks, and the heads that they divide."""

    rank: int = 0
    ranks: int = 1
    heads: Mapping[str, int] = field(default_factory=dict)  # layer -> total heads of all ranks; 1 for MLA


UNDIVIDED = Division()


@dataclass(frozen=True)
class Cut:
    """Locate neighbouring heads of a layer in a source's part and in this rank's."""

    layer: int
    there: int  # index of the first among the source rank's heads
    here: int
    count: int


@dataclass(frozen=True)
class Share:
    """Describe one rank's part in one shard of a save: heads to take from it, and its release."""

    form: Form  # the save's form
    record_bytes: int  # size of the shard's records
    rank: int  # the rank that saved the shard
    cuts: tuple[Cut, ...]  # empty if nothing is to be pulled: other shards hold the same heads
    readers: int  # ranks of this worker that release the shard, each when it has its heads


def heads_of(layer: CacheLayer, ranks: int, rank: int) -> range:
    """Return the heads of a layer that a rank has, as vLLM divides them."""
    if layer.heads >= ranks:
        each = layer.heads // ranks
        return range(rank * each, (rank + 1) * each)
    head = rank * layer.heads // ranks
    return range(head, head + 1)


def part_bytes(layer: CacheLayer, form: Form, rank: int) -> int:
    """Return the size of a layer's part in a rank's record, in bytes."""
    return layer.part_bytes(len(heads_of(layer, form.ranks, rank)), form.wire_dtype)


def record_bytes(layers: Sequence[CacheLayer], form: Form) -> int:
    """Return the size of a record in bytes: the same for all groups, that of the largest."""
    sizes: dict[int, int] = {}
    for layer in layers:
        sizes[layer.group] = sizes.get(layer.group, 0) + part_bytes(layer, form, 0)
    return max(sizes.values())


def unfit(layers: Sequence[CacheLayer], here: Form, there: Form) -> str:
    """Return why no rank of `here` can load what ranks of `there` save; empty if they can."""
    if here == there:
        return ""
    if there.wire_dtype not in WIRE_DTYPES:
        return f"KV wire dtype {there.wire_dtype!r} is not known here"
    for layer in layers:
        if not layer.heads and there.ranks != here.ranks:
            return f"{there.ranks} shards; layer {layer.name} comes from {here.ranks} ranks or not at all"
        if layer.heads and (not there.ranks or (layer.heads % there.ranks and there.ranks % layer.heads)):
            return f"{there.ranks} shards; the {layer.heads} heads of layer {layer.name} are not so divided"
    return ""


def shares(
    layers: Sequence[CacheLayer], here: Form, rank: int, there: Form, turn: int = 0
) -> tuple[Share, ...]:
    """Return what a rank takes of the shards of a save, and which of them it releases.

    turn: selects one of several source ranks with the same heads. Workers with equally many ranks have the
    same heads on the same ranks.
    """
    size = record_bytes(layers, there)
    needed = [_needed(layers, here.ranks, one, there.ranks, turn) for one in range(here.ranks)]
    found = []
    for source in range(there.ranks):
        readers = [one for one in range(here.ranks) if source in needed[one]] or [source % here.ranks]
        if rank in readers:
            cuts = tuple(needed[rank].get(source, ()))
            found.append(Share(there, size, source, cuts, len(readers)))
    return tuple(found)


def _needed(
    layers: Sequence[CacheLayer], here: int, rank: int, there: int, turn: int
) -> dict[int, list[Cut]]:
    """Return the heads that a rank needs, by the source rank that it takes them from."""
    found: dict[int, list[Cut]] = {}
    # Layers with the most heads first: heads on several source ranks then come from a rank already in use.
    for number in sorted(range(len(layers)), key=lambda number: -layers[number].heads):
        layer = layers[number]
        own = heads_of(layer, here, rank)
        start = own.start
        while start < own.stop:
            having = [one for one in range(there) if start in heads_of(layer, there, one)]
            used = [one for one in having if one in found]
            source = rank if here == there else (used or having)[(rank + turn) % len(used or having)]
            theirs = heads_of(layer, there, source)
            stop = min(own.stop, theirs.stop)
            cut = Cut(number, start - theirs.start, start - own.start, stop - start)
            found.setdefault(source, []).append(cut)
            start = stop
    return found
