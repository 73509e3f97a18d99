"""Make a `BlockCache` from vLLM's cache tensors.

Layers of two groups may share memory, in which each block belongs to one group at a time. Only within a group
does the same memory mean the same layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from baton.handoff.errors import UnsupportedCache
from baton.handoff.forms import UNDIVIDED, CacheLayer, Division, position
from baton.handoff.memory.cache import BlockCache, HostBlockCache
from baton.handoff.memory.device import DeviceBlockCache
from baton.kernels.kv_pack import AS_IS, WORD, KVTable


def block_cache(
    tensors: Mapping[str, torch.Tensor],
    num_blocks: int,
    wire_dtype: str = AS_IS,
    row_widths: Mapping[str, int] | None = None,
    groups: Sequence[Sequence[str]] = ((),),
    *,
    division: Division = UNDIVIDED,
) -> BlockCache:
    """Make one rank's cache. Raises UnsupportedCache.

    tensors: by layer, with blocks in dimension 0; a tensor that layers of a group share counts once.
    row_widths: elements that share a scale when quantised; by default the innermost dimension. groups: the
    layers of each group, which may have none on this rank; a single group has all layers.
    """
    devices = {tensor.device for tensor in tensors.values() if isinstance(tensor, torch.Tensor)}
    if len(devices) > 1:
        raise UnsupportedCache(f"the layers' KV is on several devices: {sorted(map(str, devices))}")
    widths = row_widths or {}
    tables: list[KVTable | None] = []
    layers = []
    for number, blocks in enumerate(_grouped(tensors, num_blocks, groups)):
        rows = [_row_width(name, tensors[name], widths.get(name)) for name in blocks]
        try:
            tables.append(KVTable(list(blocks.values()), rows, wire_dtype) if blocks else None)
        except ValueError as error:
            raise UnsupportedCache(f"this cache cannot travel as {wire_dtype}: {error}") from None
        layers += [
            _describe(name, tensors[name], num_blocks, division, row_width=row, group=number)
            for name, row in zip(blocks, rows, strict=True)
        ]
    largest = max(filter(None, tables), key=lambda table: table.record_bytes, default=None)
    if largest is None:
        raise UnsupportedCache("none of this rank's layers keeps KV: give the pipeline fewer stages")
    filled = tuple(_filled_up(table, largest) for table in tables)
    if filled[0].on_cpu:
        return HostBlockCache(tuple(layers), filled, division)
    return DeviceBlockCache(tuple(layers), filled, division)


def _grouped(
    tensors: Mapping[str, torch.Tensor], num_blocks: int, groups: Sequence[Sequence[str]]
) -> list[dict[str, torch.Tensor]]:
    """Return each group's layers as blocks, by position."""
    whose = {name: number for number, names in enumerate(groups) for name in names}
    found: list[dict[str, torch.Tensor]] = [{} for _ in groups]
    for name, tensor in tensors.items():
        blocks = _as_blocks(name, tensor, num_blocks)
        number = whose.get(name, 0 if len(groups) == 1 else None)
        if number is None:  # the layer reads another layer's KV
            if not any(one is tensor for other, one in tensors.items() if other in whose):
                raise UnsupportedCache(f"layer {name}: its KV is in none of the {len(groups)} groups")
            continue
        if all(blocks.data_ptr() != other.data_ptr() for other in found[number].values()):
            found[number][name] = blocks
    return [{name: one[name] for name in sorted(one, key=position)} for one in found]


def _filled_up(table: KVTable | None, largest: KVTable) -> KVTable:
    """Pad a table's records to the largest size: with zeros when packed, discarded when unpacked."""
    missing = largest.record_bytes - (table.record_bytes if table else 0)
    if table and not missing:
        return table
    zeros = torch.zeros(missing, dtype=torch.uint8, device=largest.device).expand(largest.num_blocks, missing)
    blocks, widths = (table.blocks, table.widths) if table else ((), ())
    return KVTable([*blocks, zeros], [*widths, 1], largest.wire)


def _as_blocks(name: str, tensor: Any, num_blocks: int) -> torch.Tensor:
    """View the tensor as [num_blocks, elements]."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedCache(f"layer {name}: its cache is a {type(tensor).__name__}, not one tensor")
    rows, shape, strides = tensor.shape[0], tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])
    if rows % num_blocks:
        raise UnsupportedCache(
            f"layer {name}: cache of shape {tuple(tensor.shape)}; its first dimension is not {num_blocks}"
        )
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    pieces = rows // num_blocks  # an attention kernel may split a block into several
    if spanned != math.prod(shape) or (pieces > 1 and tensor.stride(0) != spanned):
        raise UnsupportedCache(
            f"layer {name}: a block of shape {shape} and strides {strides} is not one piece of memory"
        )
    return tensor.as_strided((num_blocks, pieces * spanned), (pieces * tensor.stride(0), 1))


def _row_width(name: str, tensor: torch.Tensor, wanted: int | None) -> int:
    """Return the number of adjacent elements that share a scale."""
    sizes = [
        size
        for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
        if stride == 1 and size > 1
    ]
    innermost = int(sizes[0]) if sizes else 1
    if wanted is None or tensor.element_size() == 1:
        return innermost
    if innermost % wanted:
        raise UnsupportedCache(
            f"layer {name}: {innermost} elements are side by side in its cache; heads have {wanted}."
            " Leave --kv-wire-dtype at auto"
        )
    return wanted


def _describe(
    name: str, tensor: torch.Tensor, num_blocks: int, division: Division, *, row_width: int, group: int
) -> CacheLayer:
    shape, strides = tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])
    pieces = tensor.shape[0] // num_blocks
    heads, stretches = division.heads.get(name, 0), 1
    if heads > 1:
        # outermost in memory first; the order of dimensions of size 1 does not matter, so they come last
        order = sorted(range(len(shape)), key=lambda at: (-strides[at], shape[at] == 1))
        outside = math.prod(shape[at] for at in order[: order.index(0)])
        together = math.prod(shape[1:]) // outside  # elements of a head
        apart = not (together * tensor.element_size() % WORD or together % (2 * row_width))
        if apart and shape[0] == max(1, heads // division.ranks):
            shape, stretches = (heads, *shape[1:]), pieces * outside
            strides = _strides(shape, order)
        else:
            heads = 0
    spanned = math.prod(shape)
    return CacheLayer(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        block_shape=shape if pieces == 1 else (pieces, *shape),
        block_strides=strides if pieces == 1 else (spanned, *strides),
        block_bytes=pieces * spanned * tensor.element_size(),
        row_width=row_width,
        heads=heads,
        stretches=stretches,
        group=group,
    )


def _strides(shape: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor with dimensions in this memory order, outermost first."""
    found, stride = [0] * len(shape), 1
    for at in reversed(order):
        found[at] = stride
        stride *= shape[at]
    return tuple(found)
