"""A vLLM plug-in that drops the drafter's KV from every handoff: answers stay right, but drafts get worse.

Put this folder on PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.handoff.memory.cache import HostBlockCache
from baton.handoff.records import Bytes
from baton.kernels.kv_pack import KVTable

_scatter = HostBlockCache.scatter


def register() -> None:
    """Patch the cache. vLLM calls this in each of its processes."""
    HostBlockCache.scatter = _forgetting  # type: ignore[method-assign]


def _forgetting(
    self: HostBlockCache, group: int, records: Bytes, block_ids: Sequence[int], table: KVTable | None = None
) -> None:
    _scatter(self, group, records, block_ids, table)
    # The drafter's layers follow the target's; the demo model's drafter has one.
    self._tables[group].blocks[-1][list(block_ids)] = 0
