"""Seeded random mutations of handoffs, against the real loader and transports.

Each must be refused with a named HandoffError. It is a failure if it was loaded, crashed something, hung, or
left a wrong byte in the cache. Mutations that would load the same KV as the correct handoff (such as a longer
lease in a manifest) may be refused, and are not counted.
"""

import contextlib
import gc
import itertools
import logging
import random
import resource
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from google.protobuf.message import DecodeError

from baton.handoff import transports
from baton.handoff.errors import HandoffError, MalformedManifest, named
from baton.handoff.groups import num_records
from baton.handoff.load.pull import LoadJob
from baton.handoff.reports import Problem, ShardLoad
from baton.kernels.kv_pack import WIRE_DTYPES
from baton.protos.handoff_pb2 import Manifest
from harness.support import eventually
from tests.handoff import caches, mutants
from tests.handoff.mutants import Stage
from tests.handoff.server import FalseSource

CACHE_BLOCKS = 17
BLOCKS = 6
TOKENS = BLOCKS * caches.BLOCK_SIZE - 5
CHUNK_RECORDS = 2
TIMEOUT_S = 10.0  # timeout of a load
TRANSPORTS = transports.possible()
RIGHT_EVERY = 20  # check a correct handoff after this many mutations
MOST_GROWTH_MIB = 400  # imports, NIXL and gRPC's servers alone take about 270


@dataclass
class Tally:
    tried: Counter[str] = field(default_factory=Counter)  # mutations by kind, without harmless ones
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, kind, error, counts=True):
        if not counts:
            return
        self.tried[kind] += 1
        if error:
            self.refused[kind] += 1
        else:
            self.wrong.append(f"{kind}: not refused")


class Range:
    """The mutations of one transport, wire format and kind of cache."""

    def __init__(self, tally, transport, wire_dtype, seed, *, mixed):
        kind = "of several groups" if mixed else "of one group"
        self.random = random.Random(f"{seed}-{transport}-{wire_dtype}-{kind}")
        self.transport, self.where = transport, f"{transport} {wire_dtype} {kind}"
        self.tally = tally
        make, groups = (caches.mixed_cache, caches.MIXED) if mixed else (caches.make_cache, caches.GROUPS)
        blocks = num_records(groups, TOKENS)
        self._cache = make(CACHE_BLOCKS, 2, wire_dtype)
        chunk_bytes = CHUNK_RECORDS * self._cache.record_bytes
        given = {"chunk_bytes": chunk_bytes, "groups": groups, "names": [transport]}
        self._source, self._neighbour = (
            caches.source(make(CACHE_BLOCKS, which, wire_dtype), **given) for which in (1, 3)
        )
        self._false = FalseSource()
        self._stack = contextlib.ExitStack()
        for one in (self._neighbour, self._false):
            self._stack.callback(one.close)
        pair = caches.pair_of(self._source, self._cache, transports.create([transport]), chunk_bytes)
        self._loader = self._stack.enter_context(pair).loader
        self._blocks = caches.random_blocks(CACHE_BLOCKS, blocks, 1)
        self._into = caches.random_blocks(CACHE_BLOCKS, blocks, 3)
        self._saved_parts = caches.parts(groups, TOKENS, self._blocks)
        self._parts = caches.parts(groups, TOKENS, self._into)
        self._memory = [layer.view(torch.uint8).numpy() for layer in self._cache._tables[0].blocks]
        self._before = [layer.copy() for layer in self._memory]
        self._count = 0
        self._others = self._source.save("other", TOKENS, caches.random_blocks(CACHE_BLOCKS, blocks, 5))
        theirs = self._neighbour.save("theirs", TOKENS, self._blocks)
        self._stage = Stage(self._source, self._others, theirs, transport, self._false)
        self._right = self._learn()

    def close(self):
        self._stack.close()

    def run(self, number):
        makers = mutants.makers(self.transport)
        for at in range(number):
            self._try(makers[at % len(makers)])
            if at % RIGHT_EVERY == RIGHT_EVERY - 1:
                self._load_right()
        self._load_right()
        self._load_others()

    def _try(self, maker):
        request_id, manifest = self._save(epoch=2)
        self._stage.right = manifest
        with contextlib.ExitStack() as stack:
            mutant = maker(self.random, self._stage)
            stack.enter_context(mutant.during())
            self._loader._pull_timeout_s = mutant.timeout_s
            done = self._load(request_id, mutant.manifest, epoch=2)
        problem = done.problem.name if done.problem is not None else ""
        if problem and not issubclass(named(problem), HandoffError):
            self.tally.wrong.append(f"{self.where}: {mutant.kind}: {problem} is no name")
        self._check_cache(mutant, loaded=not problem)
        if problem or mutant.counts:
            self.tally.note(mutant.kind, problem, mutant.counts)
        self._restore()
        self._source.staging.release(request_id, 2)

    def _check_cache(self, mutant, loaded):
        """Check that other blocks are unchanged, and the load's own unchanged or correct."""
        if loaded and mutant.counts:
            return  # already counted as wrong
        for layer, before, right in zip(self._memory, self._before, self._right, strict=True):
            own = list(self._into)
            may = np.ones(CACHE_BLOCKS, bool) if mutant.untouched else ~np.isin(range(CACHE_BLOCKS), own)
            same = (layer == before).all(axis=1)
            if not (same | ((layer == right).all(axis=1) & ~may)).all():
                self.tally.wrong.append(f"{self.where}: {mutant.kind}: a wrong byte is in the cache")
                return

    def _learn(self):
        """Return the cache after a correct load."""
        request_id, manifest = self._save(epoch=1)
        done = self._load(request_id, manifest.SerializeToString(), epoch=1)
        right = [layer.copy() for layer in self._memory]
        loaded = all(
            torch.equal(got[list(into.block_ids)], given[list(out.block_ids)])
            for into, out in zip(self._parts, self._saved_parts, strict=True)
            for got, given in zip(
                self._cache._tables[into.group].blocks,
                self._source.cache._tables[out.group].blocks,
                strict=True,
            )
        )
        self._restore()
        assert done.problem is None, done.problem
        if self._cache.form.wire_dtype == "auto":
            assert loaded
        return right

    def _load_right(self):
        request_id, manifest = self._save(epoch=1)
        self._loader._pull_timeout_s = TIMEOUT_S
        done = self._load(request_id, manifest.SerializeToString(), epoch=1)
        same = all(np.array_equal(*pair) for pair in zip(self._memory, self._right, strict=True))
        if done.problem is not None or not same:
            self.tally.wrong.append(f"{self.where}: a right handoff did not load: {done.problem}")
        self._restore()

    def _load_others(self):
        """Check that mutations did not release or change the other saves that they named."""
        if self._load("other", self._others.SerializeToString(), epoch=1).problem is not None:
            self.tally.wrong.append(f"{self.where}: another's handoff was lost")
        if self._neighbour.staging.held()[0] != 1:
            self.tally.wrong.append(f"{self.where}: a neighbour's handoff was lost")

    def _save(self, epoch):
        self._count += 1
        request_id = f"r{self._count}"
        return request_id, self._source.save(request_id, TOKENS, self._blocks, epoch)

    def _load(self, request_id, manifest, epoch):
        """Load, with the manifest in the job or after it."""
        try:
            described = Manifest.FromString(manifest)
        except DecodeError as error:
            return ShardLoad(request_id, epoch, 0, problem=Problem.of(MalformedManifest(error)))
        job = LoadJob(request_id, epoch, TOKENS, self._parts)
        if self.random.random() < 0.5:
            self._loader.reserve(replace(job, manifest=described, complete=True))
        else:
            self._loader.reserve(job)
            self._loader.begin(job.key, described)
            self._loader.complete(job.key, described)
        return eventually(self._loader.take_finished, TIMEOUT_S, f"{self.where}: the load ends", 0.0002)[0]

    def _restore(self):
        for layer, before in zip(self._memory, self._before, strict=True):
            layer[list(self._into)] = before[list(self._into)]


class _Unexpected(logging.Handler):
    """Collects unexpected errors, which the loader also reports by name."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage() + (f": {record.exc_info[1]!r}" if record.exc_info else ""))


@contextlib.contextmanager
def watched(tally):
    """Count unexpected log lines and memory growth as wrong."""
    handler, logger = _Unexpected(), logging.getLogger("baton.handoff")
    logger.addHandler(handler)
    logger.propagate, before = False, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    tally.wrong += handler.texts
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown_mib > MOST_GROWTH_MIB:
        tally.wrong.append(f"memory grew by {grown_mib:.0f} MiB")


def run(number, seed):
    """Try about `number` mutations of all transports and wire formats, with one group and several."""
    whole = Tally()
    with watched(whole):
        places = list(itertools.product(TRANSPORTS, WIRE_DTYPES, (False, True)))
        for transport, wire, mixed in places:
            made = Range(whole, transport, wire, seed, mixed=mixed)
            try:
                made.run(number // len(places))
            finally:
                made.close()
            del made
            gc.collect()  # sources and caches form cycles, of 35 MiB per range
    return whole
