"""The default sizes of staging and of the memory for embeddings."""

from __future__ import annotations

import os
from dataclasses import dataclass

from baton.handoff.memory.segments import DIRECTORY
from baton.handoff.memory.views import bytes_for

CACHE_SHARE = 2  # 1/CACHE_SHARE of the KV cache holds a batch and the prompts queued after it
EMBEDDINGS_BYTES = 4 << 30  # a few hundred images of a megapixel each
FREE_SHARE = 4  # at most 1/FREE_SHARE of free /dev/shm, as other ranks and workers start at the same time


@dataclass(frozen=True)
class StagingSize:
    bytes: int
    because: str

    def __str__(self) -> str:
        return f"{self.bytes / 2**20:.0f} MiB of shared memory for saved KV ({self.because})"


def staging_size(record_bytes: int, cache_blocks: int, prompt_blocks: int, free_bytes: int) -> StagingSize:
    """Return a size that holds the longest prompt, of `prompt_blocks` blocks, if /dev/shm allows it."""
    share = StagingSize(bytes_for(cache_blocks // CACHE_SHARE, record_bytes), "half of the KV cache")
    prompt = StagingSize(bytes_for(prompt_blocks, record_bytes), "one prompt of max_model_len")
    wanted = max(share, prompt, key=lambda one: one.bytes)
    limit = max(free_bytes // FREE_SHARE, bytes_for(1, record_bytes))
    if wanted.bytes <= limit:
        return wanted
    return StagingSize(
        limit, f"a quarter of what {DIRECTORY} has free; {wanted.because} would take {wanted.bytes >> 20}"
    )


def embeddings_bytes() -> int:
    """Return how many bytes of embeddings a worker keeps; pages are taken as they are needed."""
    return min(EMBEDDINGS_BYTES, free_bytes() // FREE_SHARE)


def free_bytes() -> int:
    found = os.statvfs(DIRECTORY)
    return found.f_bavail * found.f_frsize
