"""Report which blocks an engine's prefix cache gains and loses, by the scheduler's names for blocks.

In each step vLLM's scheduler passes its block pool's events to its publisher, an object of this module, which
forwards them to the publisher set in engine.extra, if any. A block that the engine holds twice counts as
evicted once both copies are gone. If the layers form several groups, only the first group that attends to all
tokens is reported, so the report is then an upper bound on what a prompt can match.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from baton.block_log import Change
from baton.prefix_keys import key_of
from baton.protos import scheduler_pb2

logger = logging.getLogger(__name__)

_LOW = (1 << 64) - 1


def events_config(given: Any) -> Any:
    """Return a KVEventsConfig with events enabled. given: the one in engine.extra."""
    from vllm.config import KVEventsConfig

    if given is None:
        return KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config = KVEventsConfig(**given) if isinstance(given, dict) else given
    config.enable_kv_cache_events = True
    return config


def install(engine: Any) -> CacheEvents | None:
    """Report a new engine's prefix cache; None without one, or if its hashes start from a random root."""
    cache = engine.vllm_config.cache_config
    if not cache.enable_prefix_caching or engine.vllm_config.kv_events_config is None:
        return None
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        logger.warning(
            "requests are placed without regard to this worker's prefix cache, because other processes "
            "cannot compute its hashes (%s); set engine.extra.prefix_caching_hash_algo to sha256, or "
            "PYTHONHASHSEED to the same value everywhere",
            algorithm,
        )
        return None
    events = CacheEvents(engine.scheduler, algorithm)
    engine.scheduler.kv_event_publisher = events
    return events


@dataclass(slots=True)
class _Block:
    depth: int  # 1 for a prompt's first block
    copies: int = 1


class CacheEvents:
    """Publishes one engine's events. Only `hashing` may be used outside the engine's thread."""

    def __init__(self, scheduler: Any, algorithm: str) -> None:
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.kv_cache_interface import is_full_attention_spec

        groups = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        self._group = next((at for at, spec in enumerate(groups) if is_full_attention_spec(spec)), 0)
        self._block_tokens = int(groups[self._group].block_size)
        hash_tokens = int(scheduler.kv_cache_manager.block_pool.hash_block_size)
        self.hashing = scheduler_pb2.BlockHashing(
            tokens=hash_tokens,
            every=self._block_tokens // hash_tokens,
            algorithm=algorithm,
            root=kv_cache_utils.NONE_HASH,
        )
        self._next = scheduler.kv_event_publisher
        self._blocks: dict[int, _Block] = {}  # keyed by hash
        self._cleared = False
        self._touched: dict[int, int] = {}  # hash -> depth of the blocks that changed since the last `take`

    def take(self) -> Change | None:
        if not self._touched and not self._cleared:
            return None
        blocks, touched = self._blocks, self._touched.items()
        change = Change(
            self._cleared,
            removed=[key_of(one, depth) for one, depth in touched if one not in blocks],
            stored=[key_of(one, depth) for one, depth in touched if one in blocks],
        )
        self._touched, self._cleared = {}, False
        return change

    def publish(self, batch: Any) -> None:
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

        for event in batch.events:
            if isinstance(event, BlockStored):
                if event.group_idx == self._group and event.block_size == self._block_tokens:
                    self._stored(event)
            elif isinstance(event, BlockRemoved):
                if event.group_idx == self._group:
                    self._removed(event)
            elif isinstance(event, AllBlocksCleared):
                self._blocks, self._touched, self._cleared = {}, {}, True
        self._next.publish(batch)

    def shutdown(self) -> None:
        self._next.shutdown()

    def get_publisher_config(self) -> Any:
        return self._next.get_publisher_config()

    def _stored(self, event: Any) -> None:
        depth = 0
        if event.parent_block_hash is not None:
            parent = self._blocks.get(_low(event.parent_block_hash))
            if parent is None:
                return  # an earlier block is missing, so no prompt can match this one
            depth = parent.depth
        for block_hash in event.block_hashes:
            depth += 1
            name = _low(block_hash)
            if known := self._blocks.get(name):
                known.copies += 1
            else:
                self._blocks[name] = _Block(depth)
                self._touched[name] = depth

    def _removed(self, event: Any) -> None:
        for block_hash in event.block_hashes:
            name = _low(block_hash)
            block = self._blocks.get(name)
            if block is None:
                continue
            block.copies -= 1
            if not block.copies:
                del self._blocks[name]
                self._touched[name] = block.depth


def _low(block_hash: bytes | int) -> int:
    """Return the lowest 64 bits of a hash; vLLM's events have either these or all bytes."""
    return int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash & _LOW
