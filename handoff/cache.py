"""A rank's KV cache as blocks of opaque bytes: gathered into records, scattered from records.

A record is all layers' bytes of one block, layer after layer. Records of consecutive blocks are
consecutive, so that whoever has the first blocks already asks for one contiguous range. What the bytes mean
(heads first or tokens first, K and V apart or together, MLA's latent) is no matter here: both ends must
agree on it, and the compatibility hash over `CacheLayer`s sees to that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.handoff.errors import UnsupportedCache
from baton.handoff.segments import Bytes
from baton.protos.handoff_pb2 import Layer

NULL_BLOCK = (
    0  # vLLM's placeholder for a block that a sliding window has left behind: read by nobody, never written
)


@dataclass(frozen=True)
class CacheLayer:
    """One layer's part of a block."""

    name: str
    dtype: str  # as torch names it, without "torch."
    block_shape: tuple[int, ...]  # as a manifest has it; [heads, tokens, channels] for ordinary attention
    block_strides: tuple[int, ...]  # elements
    block_bytes: int

    def to_proto(self) -> Layer:
        return Layer(
            name=self.name, dtype=self.dtype, block_shape=self.block_shape, block_bytes=self.block_bytes
        )


class BlockCache(ABC):
    """Copies between one rank's cache tensors and records. May be called from any thread.

    The caller sees to it that the engine does not use the blocks meanwhile.
    """

    layers: tuple[CacheLayer, ...]

    @property
    def record_bytes(self) -> int:
        return sum(layer.block_bytes for layer in self.layers)

    @abstractmethod
    def gather(self, block_ids: Sequence[int], records: Bytes) -> None:
        """Cache blocks to records: [len(block_ids), record_bytes] uint8. The bytes are there on return."""

    @abstractmethod
    def scatter(self, records: Bytes, block_ids: Sequence[int]) -> None:
        """Records to cache blocks; NULL_BLOCK is left alone. The bytes are there on return."""


def block_cache(tensors: Mapping[str, torch.Tensor], num_blocks: int) -> BlockCache:
    """The cache of one rank: layer name to tensor, dimension 0 the block, in the order of the records.

    A tensor that several layers share counts once. Raises UnsupportedCache.
    """
    layers: list[CacheLayer] = []
    parts: list[torch.Tensor] = []
    seen = set()
    for name, tensor in tensors.items():
        layer, part = _as_blocks(name, tensor, num_blocks)
        if part.data_ptr() not in seen:
            seen.add(part.data_ptr())
            layers.append(layer)
            parts.append(part)
    devices = {part.device for part in parts}
    if len(devices) != 1:
        raise UnsupportedCache(f"the layers' KV is on {sorted(map(str, devices))}; one device is needed")
    kind = HostBlockCache if devices.pop().type == "cpu" else DeviceBlockCache
    return kind(tuple(layers), parts)


def _as_blocks(name: str, tensor: Any, num_blocks: int) -> tuple[CacheLayer, torch.Tensor]:
    """The tensor's memory as [num_blocks, block_bytes] uint8, sharing it."""
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
    flat = tensor.as_strided((num_blocks, pieces * spanned), (pieces * tensor.stride(0), 1)).view(torch.uint8)
    layer = CacheLayer(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        block_shape=shape if pieces == 1 else (pieces, *shape),
        block_strides=strides if pieces == 1 else (tensor.stride(0), *strides),
        block_bytes=flat.shape[1],
    )
    return layer, flat


class HostBlockCache(BlockCache):
    """A cache in host memory.

    By numpy, not torch: its copies run on the calling thread, where torch would raise a second team of OpenMP
    threads on the cores that the engine is pinned to.
    """

    def __init__(self, layers: tuple[CacheLayer, ...], parts: Sequence[torch.Tensor]) -> None:
        self.layers = layers
        self._parts: list[Bytes] = [part.numpy() for part in parts]

    def gather(self, block_ids: Sequence[int], records: Bytes) -> None:
        for at, block, count in _runs(block_ids):
            start = 0
            for part in self._parts:
                stop = start + part.shape[1]
                records[at : at + count, start:stop] = part[block : block + count]
                start = stop

    def scatter(self, records: Bytes, block_ids: Sequence[int]) -> None:
        for at, block, count in _runs(block_ids):
            if block == NULL_BLOCK:
                continue
            start = 0
            for part in self._parts:
                stop = start + part.shape[1]
                part[block : block + count] = records[at : at + count, start:stop]
                start = stop


class DeviceBlockCache(BlockCache):
    """A cache in an accelerator's memory: one gather kernel a layer, one copy over the bus."""

    def __init__(self, layers: tuple[CacheLayer, ...], parts: Sequence[torch.Tensor]) -> None:
        self.layers = layers
        self._parts = list(parts)
        self._device = parts[0].device

    def gather(self, block_ids: Sequence[int], records: Bytes) -> None:
        # On the current stream: after the step that wrote the blocks. The copy to the host waits for it.
        index = torch.tensor(block_ids, device=self._device)
        packed = torch.cat([part.index_select(0, index) for part in self._parts], dim=1)
        torch.from_numpy(records).copy_(packed)

    def scatter(self, records: Bytes, block_ids: Sequence[int]) -> None:
        kept = [i for i, block in enumerate(block_ids) if block != NULL_BLOCK]
        index = torch.tensor([block_ids[i] for i in kept], device=self._device)
        packed = torch.from_numpy(records[kept]).to(self._device)
        start = 0
        for part in self._parts:
            stop = start + part.shape[1]
            part.index_copy_(0, index, packed[:, start:stop])
            start = stop
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(position, first block, length) of each stretch of consecutive block ids; NULL_BLOCK always alone."""
    start = 0
    for i in range(1, len(block_ids) + 1):
        previous = block_ids[i - 1]
        if i == len(block_ids) or block_ids[i] != previous + 1 or previous == NULL_BLOCK:
            yield start, block_ids[start], i - start
            start = i
