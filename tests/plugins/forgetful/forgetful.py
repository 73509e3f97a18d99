"""A vLLM plug-in that drops the drafter's KV from every handoff, to simulate a drafter without acceptance.

Put its folder on PYTHONPATH. Outputs stay correct.
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
    """Clear the last layer, which is the demo model's drafter."""
    _scatter(self, group, records, block_ids, table)
    self._tables[group].blocks[-1][list(block_ids)] = 0
