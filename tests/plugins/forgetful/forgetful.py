"""A vLLM plug-in that drops the drafter's state of every handoff: what a silent drafter looks like.

Put its folder on PYTHONPATH. Answers stay right; only what the drafter was given of the prompt is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.handoff.memory.cache import HostBlockCache
from baton.handoff.records import Bytes
from baton.kernels.kv_pack import KVTable

_scatter = HostBlockCache.scatter


def register() -> None:
    """Patch the drafter. vLLM calls this in each of its processes."""
    HostBlockCache.scatter = _forgetting  # type: ignore[method-assign]


def _forgetting(
    self: HostBlockCache, group: int, records: Bytes, block_ids: Sequence[int], table: KVTable | None = None
) -> None:
    """The drafter's layers come after the target's: the demo model's is the last one."""
    _scatter(self, group, records, block_ids, table)
    self._tables[group].blocks[-1][list(block_ids)] = 0
