"""Reports about a prefix cache agree with vLLM's block pool after any sequence of requests."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import KVEventBatch, NullEventPublisher
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import Request

from baton.block_log import BlockLog
from baton.prefix_keys import key_of
from baton.services.engine import cache_events
from baton.services.engine.cache_events import CacheEvents, events_config

BLOCK = 16
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32
)


class Published(NullEventPublisher):
    """Stands in for a publisher set by engine.extra."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def publish(self, events):
        self.batches.append(events)


class Pool:
    """A block pool, its events, and the log that a worker makes from them."""

    def __init__(self, blocks, groups=(FULL,), group=0):
        kv_cache_utils.init_none_hash(sha256)
        self.pool = BlockPool(blocks, True, BLOCK, enable_kv_cache_events=True)
        self.others = Published()
        self.scheduler = SimpleNamespace(
            kv_event_publisher=self.others,
            kv_cache_config=SimpleNamespace(
                kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in groups]
            ),
            kv_cache_manager=SimpleNamespace(block_pool=self.pool),
        )
        self.events = CacheEvents(self.scheduler, "sha256")
        self.log = BlockLog()
        self.group = group
        self.names = {}  # hash -> name
        self.running = []

    def run(self, tokens, *, looks):
        """Let a request compute its prompt. Without `looks` it does not use the cache."""
        request = Request(
            request_id=str(len(self.names)),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
        )
        hashes = request.block_hashes
        self.names |= {
            one: key_of(int.from_bytes(one[-8:], "big"), depth) for depth, one in enumerate(hashes, start=1)
        }
        hits = []
        for one in hashes if looks else ():
            cached = self.pool.get_cached_block(one, [self.group])
            if cached is None:
                break
            hits += cached
        self.pool.touch(hits)
        missing = len(hashes) - len(hits)
        if missing > self.pool.get_num_free_blocks():
            self.pool.free_blocks(reversed(hits))
            return
        blocks = hits + self.pool.get_new_blocks(missing)
        self.pool.cache_full_blocks(request, blocks, len(hits), len(hashes), BLOCK, self.group)
        self.running.append((request, blocks))

    def end(self, which):
        _, blocks = self.running.pop(which % len(self.running))
        self.pool.free_blocks(reversed(blocks))

    def step(self):
        """Report events as the engine's scheduler and the worker do after a step."""
        if events := self.pool.take_events():
            self.events.publish(KVEventBatch(ts=0.0, events=events))
        if change := self.events.take():
            self.log.take(change)

    def held(self):
        return {self.names[key[:-4]] for key in self.pool.cached_block_hash_to_block._cache}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_reports_agree_with_the_pool(seed):
    """Requests may compute the same blocks at the same time, and single copies may be evicted."""
    draw, pool = random.Random(seed), Pool(14)
    for _ in range(60):
        what = draw.random()
        if what < 0.55:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 5))]
            pool.run([one for one in tokens for _ in range(BLOCK)], looks=draw.random() < 0.6)
        elif what < 0.95 and pool.running:
            pool.end(draw.randrange(8))
        elif not pool.running:
            pool.pool.reset_prefix_cache()
        if draw.random() < 0.7:  # otherwise the events are reported with the next ones
            pool.step()
            assert pool.log._held == pool.held()
    pool.step()
    assert pool.log._held == pool.held()


def test_another_publisher_gets_the_events_too():
    pool = Pool(14)
    pool.run([1] * BLOCK, looks=True)
    pool.step()
    pool.step()
    assert len(pool.others.batches) == 1
    assert len(pool.log) == 1


def test_only_the_group_with_full_attention_counts():
    for group, told in ((1, 3), (0, 0)):
        pool = Pool(14, (WINDOW, FULL), group)
        pool.run([1] * 3 * BLOCK, looks=True)
        pool.step()
        assert len(pool.log) == told


def test_events_are_enabled_and_other_settings_kept():
    assert (events_config(None).enable_kv_cache_events, events_config(None).publisher) == (True, "null")
    theirs = events_config({"enable_kv_cache_events": False, "publisher": "zmq", "topic": "kv"})
    assert (theirs.enable_kv_cache_events, theirs.publisher, theirs.topic) == (True, "zmq", "kv")


@pytest.mark.parametrize(
    ("algorithm", "seed", "told"), [("sha256", "", True), ("xxhash", "", False), ("xxhash", "7", True)]
)
def test_hashes_that_others_cannot_compute_are_not_reported(algorithm, seed, told, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    scheduler = Pool(14).scheduler
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo=algorithm),
        kv_events_config=events_config(None),
    )
    installed = cache_events.install(SimpleNamespace(vllm_config=config, scheduler=scheduler))
    assert (installed is not None) is told
    assert (scheduler.kv_event_publisher is installed) is told
