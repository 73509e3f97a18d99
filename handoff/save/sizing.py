"""Choose the size of staging, a rank's shared memory for saved KV, if the configuration gives none."""

from __future__ import annotations

import os
from dataclasses import dataclass

from baton.handoff.memory.segments import DIRECTORY
from baton.handoff.memory.views import bytes_for

# Half of the rank's KV cache: as much as a batch and the prompts behind it hold while they wait to be pulled.
CACHE_SHARE = 2
# A quarter of the free space of /dev/shm: other ranks and workers of the host start at the same time and see
# the same free space.
FREE_SHARE = 4


@dataclass(frozen=True)
class StagingSize:
    """A number of bytes, and the reason for it."""

    bytes: int
    because: str

    def __str__(self) -> str:
        return f"{self.bytes / 2**20:.0f} MiB of shared memory for saved KV ({self.because})"


def staging_size(record_bytes: int, cache_blocks: int, prompt_blocks: int, free_bytes: int) -> StagingSize:
    """Return the size.

    prompt_blocks: blocks of the longest prompt, which fits if /dev/shm allows it; one block always does.
    """
    share = StagingSize(bytes_for(cache_blocks // CACHE_SHARE, record_bytes), "half of the KV cache")
    prompt = StagingSize(bytes_for(prompt_blocks, record_bytes), "one prompt of max_model_len")
    wanted = max(share, prompt, key=lambda one: one.bytes)
    limit = max(free_bytes // FREE_SHARE, bytes_for(1, record_bytes))
    if wanted.bytes <= limit:
        return wanted
    return StagingSize(
        limit, f"a quarter of what {DIRECTORY} has free; {wanted.because} would take {wanted.bytes >> 20}"
    )


def free_bytes() -> int:
    """Return the free bytes of /dev/shm."""
    found = os.statvfs(DIRECTORY)
    return found.f_bavail * found.f_frsize
