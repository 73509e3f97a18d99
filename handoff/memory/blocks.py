"""vLLM's cache tensors as one `BlockCache`: checked, described, and matched to the memory they lie in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from baton.handoff.errors import UnsupportedCache
from baton.handoff.layers import CacheLayer
from baton.handoff.memory.cache import BlockCache
from baton.handoff.memory.device import DeviceBlockCache
from baton.handoff.memory.host import HostBlockCache
from baton.kernels.kv_pack import AS_IS, KVTable


def block_cache(
    tensors: Mapping[str, torch.Tensor],
    num_blocks: int,
    wire_dtype: str = AS_IS,
    row_widths: Mapping[str, int] | None = None,
) -> BlockCache:
    """Make the cache of one rank. tensors: by layer, dimension 0 the block, in the order of the records.

    A tensor that several layers share counts once. row_widths: elements that share a scale when quantised,
    the innermost dimension by default. Raises UnsupportedCache.
    """
    found: dict[str, torch.Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        blocks = _as_blocks(name, tensor, num_blocks)
        if blocks.data_ptr() not in seen:
            seen.add(blocks.data_ptr())
            found[name] = blocks
    widths = [_row_width(name, tensors[name], (row_widths or {}).get(name)) for name in found]
    devices = {blocks.device for blocks in found.values()}
    if len(devices) != 1:
        raise UnsupportedCache(f"the layers' KV is on {sorted(map(str, devices))}; one device is needed")
    try:
        table = KVTable(list(found.values()), widths, wire_dtype)
    except ValueError as error:
        raise UnsupportedCache(f"this cache cannot travel as {wire_dtype}: {error}") from None
    layers = tuple(
        _describe(name, tensors[name], num_blocks, size)
        for name, size in zip(found, table.part_bytes, strict=True)
    )
    if table.device.type == "cpu":
        return HostBlockCache(layers, table)
    return DeviceBlockCache(layers, table)


def _as_blocks(name: str, tensor: Any, num_blocks: int) -> torch.Tensor:
    """Return the tensor's memory as [num_blocks, elements], sharing it."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedCache(f"layer {name}: its cache is a {type(tensor).__name__}, not one tensor")
    rows, shape, strides = tensor.shape[0], tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])
    if rows % num_blocks:
        raise UnsupportedCache(
            f"layer {name}: cache of shape {tuple(tensor.shape)}; its first dimension is not {num_blocks}"
        )
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    pieces = rows // num_blocks  # an attention kernel may cut a block into several
    if spanned != math.prod(shape) or (pieces > 1 and tensor.stride(0) != spanned):
        raise UnsupportedCache(
            f"layer {name}: a block of shape {shape} and strides {strides} is not one piece of memory"
        )
    return tensor.as_strided((num_blocks, pieces * spanned), (pieces * tensor.stride(0), 1))


def _row_width(name: str, tensor: torch.Tensor, wanted: int | None) -> int:
    """Return the number of elements, side by side in memory, that share a scale."""
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


def _describe(name: str, tensor: torch.Tensor, num_blocks: int, record_bytes: int) -> CacheLayer:
    shape, strides = tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])
    pieces = tensor.shape[0] // num_blocks
    return CacheLayer(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        block_shape=shape if pieces == 1 else (pieces, *shape),
        block_strides=strides if pieces == 1 else (tensor.stride(0), *strides),
        block_bytes=pieces * math.prod(shape) * tensor.element_size(),
        record_bytes=record_bytes,
    )
