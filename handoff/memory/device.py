"""A cache in an accelerator's memory. Packing, copying and sending of chunks overlap.

    save   engine's queue ─ mark ┐                      ┌ mark ─ the engine may write the blocks again
           packing queue         └ pack 0 ─ pack 1 ─ … ─┘
           copying queue                    └ copy 0 ─ copy 1 ─ …      into staging's own, pinned memory
           a thread                                   └ 0 can be sent ─ 1 can be sent ─ …

    load   pulling thread     receives 0 ─ waits until 0 is loaded ─ receives 1 ─ …
           its queue                     └ copy 0, unpack 0                     └ copy 1, unpack 1 ─ …

Slots (a chunk each) are allocated once and reused in turn. A pack waits on the device for its slot's last
copy; the engine's thread waits for nothing. A request of at most `_SAVE_SLOTS` chunks frees its blocks at the
speed of device memory, a longer one at the speed of the bus.
Loads compute digests while they unpack, so a corrupt chunk is found when it is already in the cache. The load
then fails, and no other request uses its blocks. The device copies records directly if their memory is
pinned; otherwise the thread first copies them into pinned memory.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from baton.handoff import digests
from baton.handoff.forms import UNDIVIDED, CacheLayer, Division, Share
from baton.handoff.groups import Part
from baton.handoff.memory import streams
from baton.handoff.memory.cache import BlockCache, Landing, Tables, pieces, wanted
from baton.handoff.memory.streams import Mark
from baton.handoff.memory.views import Fill, SaveView
from baton.handoff.records import Bytes, Digests
from baton.kernels import kv_pack
from baton.kernels.kv_pack import KVTable

logger = logging.getLogger(__name__)

SAVE_BYTES, _SAVE_SLOTS = 16 << 20, 8  # on an H100, queueing a chunk took the engine's thread 0.15 ms
LOAD_BYTES = 32 << 20  # the bus moves this chunk in 0.6 ms
_LANES = 2  # allocated at the start


@dataclass(frozen=True)
class _Coming:
    """A chunk of a save on its way to the host."""

    copied: Mark
    digests: torch.Tensor  # [n] int64, pinned
    keep: tuple[torch.Tensor, ...]  # kept alive for queued work


class DeviceBlockCache(BlockCache):
    """A cache in device memory. Call `mark` on the engine's thread."""

    def __init__(
        self,
        layers: tuple[CacheLayer, ...],
        tables: tuple[KVTable, ...],
        division: Division = UNDIVIDED,
        *,
        device: streams.Device | None = None,
        save_bytes: int = SAVE_BYTES,
        load_bytes: int = LOAD_BYTES,
    ) -> None:
        super().__init__(layers, tables, division)
        self.on = tables[0].device
        self.device: streams.Device = device or streams.Device(self.on)
        self.load_bytes = load_bytes
        self._pinned: list[int] = []  # addresses
        self._save_chunk = max(1, save_bytes // self.record_bytes)
        self._packing, self._copying = self.device.queue(), self.device.queue()
        self._packing.after(self.device.current().mark())
        with self._packing.use():
            self._packed = self.room(_SAVE_SLOTS * self._save_chunk, self.record_bytes)
        self._left: list[Mark | None] = [None] * _SAVE_SLOTS  # each slot's last copy
        self._next_slot = 0
        self._sending = threading.Lock()  # guards the slots and both queues
        # unused lanes, by record size
        self._lanes: defaultdict[int, queue.SimpleQueue[_Lane]] = defaultdict(queue.SimpleQueue)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-save")
        self._compile()
        for lane in [_Lane(self, self.record_bytes) for _ in range(_LANES)]:
            self.give_back(lane)

    def room(self, records: int, record_bytes: int) -> torch.Tensor:
        """Allocate on the queue that will use the memory: what the engine's queue freed may be in use."""
        return torch.empty((records, record_bytes), dtype=torch.uint8, device=self.on)

    def _compile(self) -> None:
        """Run both kernels once, so that no request waits for the compiler."""
        record, device = self._packed[:1], self.on
        with self._packing.use():
            digest = torch.empty(1, dtype=torch.int64, device=device)
            for table in self._tables:
                kv_pack.pack(table, torch.zeros(1, dtype=torch.int64, device=device), record, digest)
                kv_pack.unpack(table, record, torch.full((1,), -1, device=device), digest)
        self._packing.mark().synchronize()

    def mark(self) -> Mark:
        return self.device.current().mark()

    def pin(self, memory: Bytes) -> None:
        if self.device.pin(memory):
            self._pinned.append(memory.ctypes.data)

    def fill(self, parts: Sequence[Part], fill: Fill, after: Mark | None = None) -> None:
        try:
            coming = self._send_down(parts, fill.view, after)
            read = self._packing.mark()
            self._thread.submit(_bring, coming, fill)
        except BaseException:
            for each in (self._packing, self._copying):
                each.mark().synchronize()  # before the memory is released
            fill.close()
            raise
        if after is not None:
            read.synchronize()

    def landing(self, what: str, seed: int, after: Mark | None = None, share: Share | None = None) -> Landing:
        tables = self._tables_of(share)
        size = next(iter(tables.values())).record_bytes
        try:
            lane = self._lanes[size].get_nowait()
        except queue.Empty:
            lane = _Lane(self, size)
        if after is not None:
            lane.queue.after(after)
        return _DeviceLanding(self, tables, lane, what, seed)

    def give_back(self, lane: _Lane) -> None:
        self._lanes[lane.record_bytes].put(lane)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        while self._pinned:
            self.device.unpin(self._pinned.pop())

    def _send_down(self, parts: Sequence[Part], view: SaveView, after: Mark | None = None) -> list[_Coming]:
        """Queue all packs and copies. after: see `fill`; with it, the engine's queue does not wait."""
        engine = self.device.current()
        with self._sending:
            self._packing.after(engine.mark() if after is None else after)
            coming = [one for part in parts for one in self._queue_part(part, view)]
            if after is None:
                engine.after(self._packing.mark())
        return coming

    def _queue_part(self, part: Part, view: SaveView) -> Iterator[_Coming]:
        count = len(part.block_ids)
        table, device = self._tables[part.group], self.on
        ids_host = self.device.pinned((count,), torch.int64)
        ids_host.numpy()[:] = part.block_ids
        found_host = self.device.pinned((count,), torch.int64)
        with self._packing.use():
            ids = ids_host.to(device, non_blocking=True)
            found = torch.empty(count, dtype=torch.int64, device=device)
        for start, stop in pieces(count, self._save_chunk):
            slot = self._next_slot
            self._next_slot = (slot + 1) % _SAVE_SLOTS
            packed = self._packed[slot * self._save_chunk :][: stop - start]
            if (left := self._left[slot]) is not None:
                self._packing.after(left)
            with self._packing.use():
                kv_pack.pack(table, ids[start:stop], packed, found[start:stop])
            self._copying.after(self._packing.mark())
            with self._copying.use():
                begin = part.first + start
                for first, last in view.pieces(begin, part.first + stop, stop - start):
                    target = torch.from_numpy(view.records(first, last))
                    target.copy_(packed[first - begin : last - begin], non_blocking=True)
                found_host[start:stop].copy_(found[start:stop], non_blocking=True)
            copied = self._left[slot] = self._copying.mark()
            yield _Coming(copied, found_host[start:stop], (ids_host, ids, found))


def _arrived(chunk: _Coming) -> Digests:
    chunk.copied.synchronize()
    found: Digests = chunk.digests.numpy().view(np.uint64)
    return found


def _bring(coming: list[_Coming], fill: Fill) -> None:
    """Publish each chunk when it has arrived, on a separate thread."""
    try:
        for chunk in coming:
            fill.add(_arrived(chunk))
    except Exception:  # a device error; closing the fill reports it to pullers
        logger.exception("KV did not arrive from the device")
    finally:
        fill.close()


@dataclass
class _Lane:
    """A queue and memory for a chunk, used by one pull at a time.

    Both are allocated once, because each call into torch releases the GIL and then waits for a busy engine
    thread to get it back.
    """

    cache: DeviceBlockCache
    record_bytes: int

    def __post_init__(self) -> None:
        device, on = self.cache.device, self.cache.on
        self.chunk = chunk = max(1, self.cache.load_bytes // self.record_bytes)  # records
        self.queue = device.queue()
        with self.queue.use():
            self.records = self.cache.room(chunk, self.record_bytes)
            self.ids = torch.empty(chunk, dtype=torch.int64, device=on)
            self.digests = torch.empty(chunk, dtype=torch.int64, device=on)
        self.ids_host = device.pinned((chunk,), torch.int64)
        self.digests_host = device.pinned((chunk,), torch.int64)
        self.host: torch.Tensor | None = None  # pinned copy of unpinned records; allocated on first use


@dataclass(frozen=True)
class _Landed:
    """A queued chunk of a load, whose digests are compared when the device is done."""

    first_block: int
    saved: Digests
    done: Mark


class _DeviceLanding(Landing):
    def __init__(self, cache: DeviceBlockCache, tables: Tables, lane: _Lane, what: str, seed: int) -> None:
        super().__init__(what, seed, tables)
        self._cache = cache
        self._lane: _Lane | None = lane
        self._landed: _Landed | None = None
        self._queuing = False  # stays True if queueing raises

    def take(self, part: Part, records: Bytes, saved: Digests) -> None:
        began = time.monotonic()
        lane: Any = self._lane
        for start, stop in pieces(len(records), lane.chunk):
            self._settle()
            piece = part.within(part.first + start, part.first + stop)
            if self._queue(lane, piece, records[start:stop], saved[start:stop]):
                self._settle()
        self.load_s += time.monotonic() - began

    def finish(self) -> None:
        began = time.monotonic()
        self._settle()
        self.load_s += time.monotonic() - began

    def close(self) -> None:
        lane, self._lane = self._lane, None
        if lane is None:
            return
        if self._queuing or self._landed is not None:
            lane.queue.mark().synchronize()
        self._cache.give_back(lane)

    def _queue(self, lane: _Lane, part: Part, records: Bytes, saved: Digests) -> bool:
        """Queue a chunk. Return whether the device reads `records` in place, so they are still in use."""
        count, device = len(records), self._cache.device
        parts = device.pinned_parts(records)
        lane.ids_host.numpy()[:count] = wanted(part.block_ids)
        if not parts:
            if lane.host is None:
                lane.host = device.pinned(tuple(lane.records.shape), torch.uint8)
            lane.host.numpy()[:count] = records
        self._queuing = True
        ids, found, target = lane.ids[:count], lane.digests[:count], lane.records[:count]
        with lane.queue.use():
            ids.copy_(lane.ids_host[:count], non_blocking=True)
            if not parts and lane.host is not None:
                target.copy_(lane.host[:count], non_blocking=True)
            for start, stop in parts:
                memory = (ctypes.c_uint8 * (stop - start)).from_address(records.ctypes.data + start)
                source = torch.frombuffer(memory, dtype=torch.uint8)  # also works for read-only memory
                target.view(-1)[start:stop].copy_(source, non_blocking=True)
            kv_pack.unpack(self._tables[part.group], target, ids, found)
            lane.digests_host[:count].copy_(found, non_blocking=True)
        self._landed = _Landed(part.first, saved.copy(), lane.queue.mark())
        self._queuing = False
        return bool(parts)

    def _settle(self) -> None:
        """Wait until the queued chunk is in the cache, and compare its digests."""
        lane, landed = self._lane, self._landed
        if lane is None or landed is None:
            return
        landed.done.synchronize()
        self._landed = None
        own = lane.digests_host.numpy()[: len(landed.saved)].view(np.uint64)
        came = digests.seeded(own, self.seed, landed.first_block)
        digests.compare(self.what, landed.first_block, came, landed.saved)
