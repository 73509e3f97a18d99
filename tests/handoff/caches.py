"""Sources and pullers without engines, with random bytes as KV."""

import contextlib
import functools
import random
from contextlib import closing
from dataclasses import dataclass

import grpc
import numpy as np
import pytest
import torch

from baton.handoff import transports
from baton.handoff.channels import HandoffClient
from baton.handoff.groups import CacheGroup, Part, described
from baton.handoff.load.loader import Loader, State
from baton.handoff.load.pull import LoadJob
from baton.handoff.manifest import Puller, seal
from baton.handoff.memory.arena import STEP_BYTES, Arena
from baton.handoff.memory.blocks import block_cache
from baton.handoff.memory.cache import BlockCache, HostBlockCache
from baton.handoff.save.saver import SaveJob, Saver
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.handoff.transports.base import Transport
from baton.handoff.transports.nixl import Nixl
from baton.protos.handoff_pb2 import Manifest, Shard
from harness.support import eventually
from tests.handoff.host_device import gathered

# parameters of tests; those of nixl are skipped if the package is missing
_without_nixl = pytest.mark.skipif(bool(Nixl.hindrance()), reason=Nixl.hindrance())
EVERY = tuple(transports.possible())
TRANSPORTS = ["shm", pytest.param("nixl", marks=_without_nixl), "tcp"]
MIB = 1 << 20
BLOCK_SIZE = 32
HASH = "abcdef0123456789"
GROUPS = (CacheGroup(BLOCK_SIZE),)
# full attention, a window, and a state, whose layers share memory
MIXED = (CacheGroup(BLOCK_SIZE), CacheGroup(BLOCK_SIZE, window=64), CacheGroup(1024, state="of a test"))


ROW_WIDTHS = {
    "model.layers.0.attn": 64,
    "model.layers.1.attn": 64,
    "model.layers.2.mla": 576,
    "model.layers.3.drafter": 24,
}


def tensors(num_blocks, seed=0):
    """Attention with heads first and with tokens first, MLA, and a drafter of another width and dtype."""
    generator = torch.Generator().manual_seed(seed)

    def fresh(*shape, dtype=torch.bfloat16):
        return torch.randn(num_blocks, *shape, generator=generator).to(dtype)

    return {
        "model.layers.0.attn": fresh(2, BLOCK_SIZE, 128),
        "model.layers.1.attn": fresh(BLOCK_SIZE, 2, 128).transpose(1, 2),
        "model.layers.2.mla": fresh(1, BLOCK_SIZE, 576),
        "model.layers.3.drafter": fresh(3, BLOCK_SIZE, 48, dtype=torch.float32),
    }


def mixed_cache(num_blocks, seed=0, wire_dtype="auto"):
    """A cache with the groups MIXED. The state's layer shares memory with the others' first layer."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(2, num_blocks, 2, BLOCK_SIZE, 64, generator=generator).bfloat16()
    state = memory[0].view(torch.int8).reshape(num_blocks, -1)
    found = {"full.0": memory[0], "full.1": memory[1], "window.0": memory[0], "window.1": memory[1]}
    names = [["full.0", "full.1"], ["window.0", "window.1"], ["state.0"]]
    cache = block_cache({**found, "state.0": state}, num_blocks, wire_dtype, groups=names)
    assert isinstance(cache, HostBlockCache)
    return cache


def parts(groups, num_tokens, block_ids):
    """The parts of a whole save whose records have these blocks, in order."""
    made, first = [], 0
    for number, group in enumerate(groups):
        count = len(group.live(num_tokens))
        made.append(Part(number, first, tuple(block_ids[first : first + count])))
        first += count
    return tuple(made)


def random_blocks(cache_blocks, count, seed=0):
    """Return block ids, in order for an even seed, else shuffled; never the null block."""
    ids = list(range(1, cache_blocks))
    if seed % 2:
        random.Random(seed).shuffle(ids)
    return tuple(ids[:count])


@dataclass
class Source:
    """A rank's saving side."""

    cache: BlockCache
    staging: Staging
    service: HandoffService
    saver: Saver
    transports: list[Transport]
    groups: tuple[CacheGroup, ...] = GROUPS

    def save(self, request_id, num_tokens, block_ids, epoch=1):
        saved = self.saver.save(SaveJob(request_id, epoch, parts(self.groups, num_tokens, block_ids)))
        assert saved.problem is None, saved.problem
        return self.manifest(request_id, num_tokens, len(block_ids), saved, epoch)

    def begin(self, request_id, block_ids, whole):
        """Save the first blocks of an incomplete prompt of `whole` blocks."""
        saved = self.saver.save(
            SaveJob(request_id, 1, (Part(0, 0, tuple(block_ids)),), whole=whole, last=False)
        )
        assert saved.problem is None, saved.problem
        return self.manifest(request_id, whole * BLOCK_SIZE, whole, saved)

    def manifest(self, request_id, num_tokens, num_blocks, saved, epoch=1):
        manifest = Manifest(
            request_id=request_id,
            epoch=epoch,
            worker_id="source",
            compatibility_hash=HASH,
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            groups=described(self.groups, num_tokens),
            shards=[Shard.FromString(saved.shard)],
            wire_dtype=self.cache.form.wire_dtype,
            saved_at_s=0 if saved.begun else saved.saved_at_s,
            save_ms=saved.save_ms,
        )
        return seal(manifest)

    def close(self):
        self.service.close(grace_s=0)
        self.saver.close()
        self.cache.close()
        self.staging.close()
        for transport in self.transports:
            transport.close()


def source(
    cache,
    *,
    lease_s=30.0,
    staging_bytes=16 * MIB,
    chunk_bytes=MIB,
    groups=GROUPS,
    rank=0,
    names=("shm", "tcp"),
    step_bytes=STEP_BYTES,
):
    """names: the transports; by default those that are made quickly."""
    offering = transports.create(names)
    pin = functools.partial(transports.register, offering)
    withdraw = functools.partial(transports.withdraw, offering)
    staging = Staging(Arena(staging_bytes, cache.record_bytes, step_bytes, pin=pin), lease_s, withdraw)
    service = HandoffService(staging, rank, "127.0.0.1:0", chunk_bytes)
    saver = Saver(cache, staging, offering, rank=rank, address=service.address, chunk_bytes=chunk_bytes)
    return Source(cache, staging, service, saver, offering, groups)


@dataclass
class Pair:
    source: Source
    loader: Loader
    client: HandoffClient

    def load(self, manifest, *parts, request_id="r", epoch=1, early=False):
        order = request_id, epoch, manifest.num_tokens, parts
        self.loader.reserve(LoadJob(*order, manifest=manifest, complete=not early))

    def finished(self):
        (one,) = eventually(self.loader.take_finished, 10, "the load is reported", 0.001)
        return one

    def succeeds(self):
        done = self.finished()
        assert done.problem is None
        return done

    def fails(self, name, *texts):
        problem = self.finished().problem
        assert problem.name == name
        for text in texts:
            assert text in problem.text

    def pulled(self, name="r"):
        """Return how many blocks of a running pull are here."""
        load = self.loader._loads.get((name, 1))
        return load.progress.blocks if load is not None and load.state is State.PULLING else 0

    def landed(self, blocks):
        """Return the records of these blocks of the loader's cache."""
        return records(self.loader._cache, blocks)


@contextlib.contextmanager
def pair_of(saving, cache, pulling, chunk_bytes=0):
    """A loader into `cache`, which pulls with these transports. Closes all, the transports too."""
    with closing(saving), closing(HandoffClient()) as client:
        loader = Loader(
            cache,
            puller(cache, saving.groups),
            pulling,
            client,
            pull_timeout_s=5,
            chunk_bytes=chunk_bytes or 3 * cache.record_bytes,
        )
        with closing(loader):
            yield Pair(saving, loader, client)
    for transport in pulling:
        transport.close()


def puller(cache, groups=GROUPS):
    return Puller("puller", cache.rank, HASH, groups, cache.layers, cache.form)


def records(cache, block_ids, group=0):
    out = np.empty((len(block_ids), cache.record_bytes), np.uint8)
    gathered(cache, group, block_ids, out)
    return out


def make_cache(num_blocks, seed=0, wire_dtype="auto"):
    cache = block_cache(tensors(num_blocks, seed), num_blocks, wire_dtype, ROW_WIDTHS)
    assert isinstance(cache, HostBlockCache)
    return cache


def released(client, manifest, *, confirmed=False):
    """Release a save on all its ranks, and return whether they held it."""
    try:
        calls = client.release_soon(manifest, confirmed=confirmed)
        return False not in [call.result().held for call in calls]
    except grpc.RpcError:
        return False
