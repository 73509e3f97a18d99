"""The cache for accelerators, on a GPU if there is one: the order of work, and chunks."""

import threading
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from baton.handoff import digests
from baton.handoff.errors import DigestMismatch, SaveFailed
from baton.handoff.groups import Part
from baton.handoff.memory import device as device_cache
from baton.handoff.memory import segments, streams
from baton.handoff.memory.arena import Arena
from baton.handoff.memory.blocks import block_cache
from baton.handoff.memory.cache import HostBlockCache
from baton.handoff.memory.device import DeviceBlockCache
from baton.handoff.records import Bytes
from baton.handoff.save.saver import SaveJob, Saver
from baton.handoff.save.staging import Staging
from baton.kernels import kv_pack
from baton.kernels.kv_pack import WIRE_DTYPES, KVTable
from tests.handoff.caches import MIB, ROW_WIDTHS, make_cache, random_blocks, records, tensors
from tests.handoff.host_device import HostDevice, HostQueue, gathered

BLOCKS = 29
GPU = torch.cuda.is_available()


@pytest.fixture
def on_device():
    """A function like `make_cache`, but on the GPU, or a stand-in for it."""
    with ExitStack() as made:

        def make(seed, wire="auto", device=None, chunk=3):
            where = "cuda" if GPU and device is None else "cpu"
            host = make_cache(BLOCKS, seed, wire)
            flat = [
                tensor.as_strided((BLOCKS, tensor.stride(0)), (tensor.stride(0), 1)).to(where)
                for tensor in tensors(BLOCKS, seed).values()
            ]
            table = KVTable(flat, list(ROW_WIDTHS.values()), wire)
            size = chunk * table.record_bytes
            device = device or (None if GPU else HostDevice())
            cache = DeviceBlockCache(host.layers, (table,), device=device, save_bytes=size, load_bytes=size)
            return made.enter_context(closing(cache))

        yield make


def land(cache, sent, own, ids, step=4):
    landing = cache.landing("KV of a test", 77, cache.mark())
    saved = digests.seeded(own, 77, 0)
    try:
        for at in range(0, len(ids), step):
            chunk = sent[at : at + step].copy()
            landing.take(Part(0, at, ids[at : at + step]), chunk, saved[at : at + step])
            chunk[:] = 0xEE  # a transport may use its memory again
        landing.finish()
    finally:
        landing.close()


@pytest.mark.parametrize("count", [1, 3, 4, 28])
@pytest.mark.parametrize("wire", WIRE_DTYPES)
def test_it_gathers_and_loads_as_a_host_cache_does(on_device, wire, count):
    ids, into = random_blocks(BLOCKS, count, 1), random_blocks(BLOCKS, count, 3)
    host, device = make_cache(BLOCKS, 1, wire), on_device(1, wire)
    expected, got = (np.full((count, host.record_bytes), 0xA5, np.uint8) for _ in range(2))
    own = gathered(device, 0, ids, got)
    assert np.array_equal(own, host.gather(0, ids, expected))
    assert np.array_equal(got, expected)
    there, here = make_cache(BLOCKS, 2, wire), on_device(2, wire)
    for cache in (there, here):
        land(cache, got, own, into)
    everything = range(BLOCKS)
    assert np.array_equal(records(here, everything), records(there, everything))


def test_the_null_block_is_never_written(on_device):
    cache = on_device(1)
    before = records(cache, [0])
    sent = np.full((4, cache.record_bytes), 0xAB, np.uint8)
    own = np.empty(len(sent), np.uint64)
    kv_pack.digest(sent, own)
    land(cache, sent, own, (0, 1, 0, 2))
    assert np.array_equal(records(cache, [0]), before)
    assert (records(cache, [1, 2]) == 0xAB).all()


@pytest.mark.parametrize("bad", [0, 5, 9])
def test_broken_bytes_fail_the_load_and_the_lane_serves_the_next(on_device, bad):
    source, cache = on_device(1), on_device(2)
    ids = random_blocks(BLOCKS, 10)
    sent = np.empty((10, cache.record_bytes), np.uint8)
    own = gathered(source, 0, ids, sent)
    spoilt = sent.copy()
    spoilt[bad, 1001] ^= 8
    with pytest.raises(DigestMismatch, match=f"KV of a test: block {bad} came with digest"):
        land(cache, spoilt, own, ids)
    land(cache, sent, own, ids)
    assert np.array_equal(records(cache, ids), sent)


# ---- order of work, which a device without queues cannot get wrong


@dataclass(eq=False)
class Done:
    """A mark: for each queue, how much of its work is done when the mark is reached."""

    reached: dict = field(repr=False)

    def synchronize(self):
        pass


@dataclass(eq=False)
class Recorder(HostQueue):
    """A queue that records what its work waits for."""

    log: list = field(repr=False)
    in_use: list = field(default_factory=list, repr=False)  # queues in use on the device
    waited: dict = field(default_factory=dict, repr=False)
    position: int = 0

    @contextmanager
    def _use(self):
        self.position += 1
        self.log.append((self, dict(self.waited)))
        self.in_use.append(self)
        yield
        self.in_use.pop()

    def use(self):
        return self._use()

    def after(self, mark):
        assert isinstance(mark, Done)
        for queue, position in mark.reached.items():
            self.waited[queue] = max(position, self.waited.get(queue, 0))

    def mark(self):
        return Done({**self.waited, self: self.position})


class Recording(HostDevice):
    def __init__(self):
        super().__init__()
        self.log = []
        self.queues = []
        self.in_use = []
        self.engine = Recorder(self.log, self.in_use)

    def queue(self):
        self.queues.append(Recorder(self.log, self.in_use))
        return self.queues[-1]

    def current(self):
        return self.engine


def test_a_pack_waits_for_the_step_and_its_slot_and_the_engine_waits_for_packs_only(on_device):
    device = Recording()
    cache = on_device(1, device=device, chunk=1)
    packing, copying = device.queues[:2]
    slots, count = device_cache._SAVE_SLOTS, 24
    assert count > slots + 3
    out = np.empty((count, cache.record_bytes), np.uint8)
    with device.engine.use():
        pass  # the step that wrote the blocks
    for _ in range(2):  # the second time, slots are reused
        device.log.clear()
        before = copying.position
        step = device.engine.position
        gathered(cache, 0, random_blocks(BLOCKS, count), out)
        packs = [waited for queue, waited in device.log if queue is packing][1:]  # the first copies block ids
        copies = [waited for queue, waited in device.log if queue is copying]
        assert len(packs) == len(copies) == count
        for number, (pack, copy) in enumerate(zip(packs, copies, strict=True)):
            assert pack[device.engine] == step
            if before + number >= slots:
                assert pack[copying] == before + number - slots + 1  # its slot's last copy, and no later one
            assert copy[packing] >= packing.position - count + number + 1
        assert device.engine.waited[packing] == packing.position
        if before:
            continue
        # the engine waits for the last pack, not for the last copies, which need the bus
        assert device.engine.waited.get(copying, 0) <= count - slots


def test_a_fill_on_another_thread_waits_for_its_mark_and_the_engine_does_not_wait(on_device):
    device = Recording()
    cache = on_device(1, device=device, chunk=1)
    packing, copying = device.queues[:2]
    staging = Staging(Arena(2 * MIB, cache.record_bytes), lease_s=30)
    entry = staging.reserve("r", 1, 4)
    with device.engine.use():
        pass  # the step that wrote the blocks
    mark = cache.mark()
    with device.engine.use():
        pass  # the next one
    device.log.clear()
    waited = dict(device.engine.waited)
    cache.fill([Part(0, 0, (1, 2, 3, 4))], staging.filling(entry), mark)
    assert {waited[device.engine] for queue, waited in device.log if queue is packing} == {1}
    assert device.engine.waited == waited
    assert len([queue for queue, _ in device.log if queue is copying]) == 4
    cache.close()
    assert entry.view.whole == 4
    staging.close()


def test_a_load_waits_for_what_the_engine_had_queued(on_device):
    device = Recording()
    cache = on_device(1, device=device)
    sent = np.empty((4, cache.record_bytes), np.uint8)
    own = gathered(cache, 0, (1, 2, 3, 4), sent)
    with device.engine.use():
        pass
    device.log.clear()
    land(cache, sent, own, (5, 6, 7, 8))
    assert device.log
    assert all(waited[device.engine] == device.engine.position for _, waited in device.log)


def test_a_load_leaves_no_memory_in_the_engines_pool(on_device):
    device = Recording()
    used = []

    class Rooms(DeviceBlockCache):
        def room(self, records, record_bytes):
            used.append(bool(device.in_use) and device.in_use[-1] is not device.engine)
            return super().room(records, record_bytes)

    whole = on_device(1)
    Rooms(whole.layers, whole._tables, device=device).close()
    assert len(used) > 1  # the slots of saves, and those of lanes
    assert all(used), "memory that is not made in a queue of its own may still be the engine's"


def test_pinned_records_are_copied_from_where_they_lie(on_device):
    device = Recording()
    cache = on_device(1, device=device, chunk=2)
    segment = segments.create(MIB)
    other = segments.attach(segment.name).data
    count, size = 4, cache.record_bytes
    sent = segment.data[: count * size].reshape(count, size)
    saved = digests.seeded(gathered(cache, 0, (1, 2, 3, 4), sent), 77, 0)
    lanes = [cache._lanes[size].get() for _ in range(device_cache._LANES)]
    cache.give_back(lanes[0])

    def copied_by_a_thread(ids):
        landing = cache.landing("KV of a test", 77)
        landing.take(Part(0, 0, ids), other[: count * size].reshape(count, size), saved)
        landing.finish()
        landing.close()
        assert np.array_equal(records(cache, ids), sent)
        return lanes[0].host is not None

    # two pieces, whose border is in the second record
    device.pin(other[: size + 100])
    device.pin(other[size + 100 :])
    assert not copied_by_a_thread((5, 6, 7, 8))
    device.unpin(other.ctypes.data)
    assert copied_by_a_thread((9, 10, 11, 12))
    segment.close()


def test_parts_of_pinned_memory():
    pins = streams.Pins()
    for start, stop in ((300, 400), (100, 200), (200, 300)):
        pins.add(start, stop)
    assert pins.parts(100, 400) == [(0, 100), (100, 200), (200, 300)]
    assert pins.parts(250, 320) == [(0, 50), (50, 70)]
    assert pins.parts(99, 200) == pins.parts(350, 401) == pins.parts(500, 501) == []
    pins.remove(200)
    assert pins.parts(150, 350) == []
    assert pins.parts(150, 200) == [(0, 50)]


# ---- chunks can be read while others are being copied


class Gate(HostDevice):
    """A device whose copies arrive when a test lets them."""

    def __init__(self):
        super().__init__()
        self.arrived = threading.Semaphore(1)  # the kernels' first run
        self.broken = False

    def queue(self):
        return _Gated(self)


class _Gated(HostQueue):
    def __init__(self, gate):
        self._gate = gate

    def synchronize(self):
        assert self._gate.arrived.acquire(timeout=10)
        if self._gate.broken:
            raise RuntimeError("the device is gone")


@dataclass
class Under:
    """A save whose chunks arrive one by one, when the test lets them."""

    gate: Gate
    cache: DeviceBlockCache
    staging: Staging
    expected: Bytes

    def waiting(self, count):
        with self.staging.opened("r", 1) as entry:
            return entry.view.whole == count


@pytest.fixture
def under(on_device):
    gate = Gate()
    cache = on_device(1, device=gate, chunk=3)
    staging = Staging(Arena(2 * MIB, cache.record_bytes), lease_s=30)
    expected = records(make_cache(BLOCKS, 1), random_blocks(BLOCKS, 8))
    saver = Saver(cache, staging, [], rank=0, address="nowhere:0", chunk_bytes=MIB)
    saved = saver.save(SaveJob("r", 1, (Part(0, 0, random_blocks(BLOCKS, 8)),)))
    assert saved.problem is None
    yield Under(gate, cache, staging, expected)
    gate.arrived.release(99)
    cache.close()
    staging.close()


def test_a_chunk_can_be_read_while_the_next_is_on_its_way(under, eventually):
    with under.staging.opened("r", 1) as entry:
        assert entry.view.whole == 0
        for whole in (3, 6, 8):
            under.gate.arrived.release()
            eventually(lambda whole=whole: entry.view.whole == whole)
            assert np.array_equal(entry.view.records(0, whole), under.expected[:whole])
        own = digests.of_records(under.expected, digests.seed("r", 1), 0)
        assert np.array_equal(entry.view.digests(0, 8), own)


def test_a_device_error_fails_the_records(under):
    under.gate.arrived.release()
    with under.staging.opened("r", 1) as entry:
        entry.view.wait(0, 3, "KV", lambda: None)
        under.gate.broken = True
        under.gate.arrived.release()
        with pytest.raises(SaveFailed, match="KV of r: the source could not save it all"):
            entry.view.wait(3, 4, "KV of r", lambda: None)


def test_memory_that_is_being_written_is_not_used_again(under, eventually):
    free = under.staging.free_blocks
    under.staging.release("r", 1)
    assert under.staging.free_blocks == free
    under.gate.arrived.release(99)
    eventually(lambda: under.staging.free_blocks == free + 8 == under.staging.capacity)


def test_a_save_may_consist_of_several_runs(on_device):
    cache = on_device(1, chunk=3)
    staging = Staging(Arena(2 * MIB, cache.record_bytes), lease_s=30)
    saver = Saver(cache, staging, [], rank=0, address="nowhere:0", chunk_bytes=MIB)
    places = [staging.reserve(f"{i}", 1, 1) for i in range(staging.capacity)]
    for place in [*places[1:4], *places[6:13:2], places[17]]:
        staging.discard(place)
    expected = records(make_cache(BLOCKS, 1), random_blocks(BLOCKS, 8))
    assert saver.save(SaveJob("r", 1, (Part(0, 0, random_blocks(BLOCKS, 8)),))).problem is None
    with staging.opened("r", 1) as entry:
        assert entry.place.runs == ((1, 3), (6, 1), (8, 1), (10, 1), (12, 1), (17, 1))
        at = 0
        while at < 8:  # a wait may end with the first chunk
            at = entry.view.wait(at, 8, "KV", lambda: None)
        got = [entry.view.records(*part) for part in entry.view.pieces(0, 8, 8)]
        assert np.array_equal(np.concatenate(got), expected)
        own = digests.of_records(expected, digests.seed("r", 1), 0)
        assert np.array_equal(entry.view.digests(0, 8), own)
    staging.close()


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_cache_on_a_gpu_is_a_device_cache():
    cache = block_cache({name: one.cuda() for name, one in tensors(BLOCKS).items()}, BLOCKS)
    assert isinstance(cache, DeviceBlockCache)
    assert not isinstance(cache, HostBlockCache)
    cache.close()
