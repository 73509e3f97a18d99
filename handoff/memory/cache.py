"""A rank's KV cache as blocks: gathered into records, scattered from records.

A record is all layers' parts of one block, layer after layer, as kernels/kv_pack makes them: the block's
bytes as they are, or quantised. Records of consecutive blocks are consecutive, so that whoever has the
first blocks already asks for one contiguous range. What the bytes mean (heads first or tokens first, K and
V apart or together, MLA's latent) is no matter here: both ends must agree on it, and the compatibility hash
over `CacheLayer`s sees to that.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from baton.handoff import digests
from baton.handoff.digests import Digests
from baton.handoff.errors import UnsupportedCache
from baton.handoff.memory.segments import Bytes
from baton.handoff.memory.streams import Mark
from baton.handoff.save.staging import Fill
from baton.kernels import kv_pack
from baton.kernels.kv_pack import AS_IS, KVTable
from baton.protos.handoff_pb2 import Layer

NULL_BLOCK = (
    0  # vLLM's placeholder for a block that a sliding window has left behind: read by nobody, never written
)
# Records are digested and then copied: in pieces of this size the second pass finds them in the L2 cache.
_CACHED_BYTES = 512 << 10


@dataclass(frozen=True)
class CacheLayer:
    """One layer's part of a block."""

    name: str
    dtype: str  # as torch names it, without "torch."
    block_shape: tuple[int, ...]  # as a manifest has it; [heads, tokens, channels] for ordinary attention
    block_strides: tuple[int, ...]  # elements
    block_bytes: int
    record_bytes: int  # of its part in a record

    def to_proto(self) -> Layer:
        return Layer(
            name=self.name,
            dtype=self.dtype,
            block_shape=self.block_shape,
            block_bytes=self.block_bytes,
            record_bytes=self.record_bytes,
        )


class Landing(ABC):
    """One pull's way into the cache, from one thread. The blocks are nobody else's until it ended."""

    def __init__(self, what: str, seed: int) -> None:
        """what: is pulled, for errors' texts; seed: of its digests."""
        self.what = what
        self.seed = seed
        self.check_s = 0.0  # for digests, where they are computed apart
        self.load_s = 0.0

    @abstractmethod
    def take(self, first_block: int, records: Bytes, saved: Digests, block_ids: Sequence[int]) -> None:
        """Check a chunk against its digests and put it into the cache. `records` can be reused on return.

        Raises DigestMismatch, possibly for an earlier chunk.
        """

    @abstractmethod
    def finish(self) -> None:
        """All that was taken is in the cache on return. Raises DigestMismatch."""

    @abstractmethod
    def close(self) -> None:
        """Nothing writes the blocks any more on return, however the pull ended. Idempotent."""


class BlockCache(ABC):
    """Copies between one rank's cache tensors and records.

    The caller sees to it that the engine does not use the blocks meanwhile.
    """

    def __init__(self, layers: tuple[CacheLayer, ...], table: KVTable) -> None:
        self.layers = layers
        self._table = table

    @property
    def wire_dtype(self) -> str:
        return self._table.wire

    @property
    def record_bytes(self) -> int:
        return self._table.record_bytes

    @abstractmethod
    def fill(self, block_ids: Sequence[int], fill: Fill) -> None:
        """Gather cache blocks into the records of fill.view, and close it in the end.

        Called on the engine's thread, after the step that wrote the blocks. On return the engine may reuse
        them, by what it then queues; the records may still be on their way.
        """

    @abstractmethod
    def gather(self, block_ids: Sequence[int], records: Bytes) -> Digests:
        """The same at once: [n, record_bytes] uint8 in host memory, overwritten; the records' own digests."""

    @abstractmethod
    def landing(self, what: str, seed: int, after: Mark | None = None) -> Landing:
        """A way for one pull, on its thread. after: a `mark` from when its blocks became its own."""

    def mark(self) -> Mark | None:
        """What the engine has queued so far, on its thread: a landing writes only after it."""
        return None

    def pin(self, memory: Bytes) -> None:  # noqa: B027 (host memory needs nothing)
        """Records will be written to this host memory for as long as the process lives."""

    def close(self) -> None:  # noqa: B027
        """Wait for fills under way. Idempotent."""


def block_cache(
    tensors: Mapping[str, torch.Tensor],
    num_blocks: int,
    wire_dtype: str = AS_IS,
    row_widths: Mapping[str, int] | None = None,
) -> BlockCache:
    """The cache of one rank: layer name to tensor, dimension 0 the block, in the order of the records.

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
        raise UnsupportedCache(f"wire dtype {wire_dtype} cannot be made of this cache: {error}") from None
    layers = tuple(
        _describe(name, tensors[name], num_blocks, size)
        for name, size in zip(found, table.part_bytes, strict=True)
    )
    if table.device.type == "cpu":
        return HostBlockCache(layers, table)
    from baton.handoff.memory.device import DeviceBlockCache

    return DeviceBlockCache(layers, table)


def _as_blocks(name: str, tensor: Any, num_blocks: int) -> torch.Tensor:
    """The tensor's memory as [num_blocks, elements], sharing it."""
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
    """Elements side by side in memory that share a scale."""
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


class HostBlockCache(BlockCache):
    """A cache in host memory: all is done on the calling thread, and on return. Any thread may call."""

    def __init__(self, layers: tuple[CacheLayer, ...], table: KVTable) -> None:
        super().__init__(layers, table)
        self.gather((), np.empty((0, table.record_bytes), np.uint8))  # compiles; no save shall wait for that

    def fill(self, block_ids: Sequence[int], fill: Fill) -> None:
        try:
            for start, stop in fill.view.pieces(0, len(block_ids), len(block_ids)):
                fill.add(self.gather(block_ids[start:stop], fill.view.records(start, stop)))
        finally:
            fill.close()

    def gather(self, block_ids: Sequence[int], records: Bytes) -> Digests:
        own = np.empty(len(block_ids), np.uint64)
        kv_pack.pack(self._table, np.asarray(block_ids, np.int64), records, own)
        return own

    def scatter(self, records: Bytes, block_ids: Sequence[int]) -> None:
        """Records to cache blocks; NULL_BLOCK is left alone."""
        kv_pack.unpack(self._table, records, wanted(block_ids), None)

    def landing(self, what: str, seed: int, after: Mark | None = None) -> Landing:
        del after  # the engine's steps end before the next begins
        return _HostLanding(self, what, seed)


class _HostLanding(Landing):
    """Checks first and copies then: nothing of a broken chunk reaches the cache."""

    def __init__(self, cache: HostBlockCache, what: str, seed: int) -> None:
        super().__init__(what, seed)
        self._cache = cache

    def take(self, first_block: int, records: Bytes, saved: Digests, block_ids: Sequence[int]) -> None:
        began = time.monotonic()
        for start, stop in pieces(len(records), _CACHED_BYTES // self._cache.record_bytes):
            piece = records[start:stop]
            came = digests.of_records(piece, self.seed, first_block + start)
            digests.compare(self.what, first_block + start, came, saved[start:stop])
            checked = time.monotonic()
            self._cache.scatter(piece, block_ids[start:stop])
            self.check_s += checked - began
            began = time.monotonic()
            self.load_s += began - checked

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


def wanted(block_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For unpacking: NULL_BLOCK is not written."""
    ids = np.array(block_ids, np.int64)
    ids[ids == NULL_BLOCK] = -1
    return ids


def pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of at most `most`, and of one at least."""
    step = max(1, most)
    for start in range(0, total, step):
        yield start, min(start + step, total)
