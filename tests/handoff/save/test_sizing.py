"""The default size of staging: half a cache, but at least the longest prompt."""

import pytest

from baton.handoff.memory.views import slots_in
from baton.handoff.save.sizing import staging_size

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("cache", "prompt", "free", "slots", "because"),
    [
        (1000, 100, 100 * GIB, 500, "half of the KV cache"),
        (1000, 800, 100 * GIB, 800, "one prompt of max_model_len"),
        (1000, 100, 1 * GIB, 255, "a quarter of what /dev/shm has free; half of the KV cache would take 500"),
        (1000, 100, 0, 1, "a quarter of what /dev/shm has free"),
    ],
)
def test_it_is_a_share_of_the_cache_that_holds_any_prompt(cache, prompt, free, slots, because):
    found = staging_size(MIB, cache, prompt, free)
    assert slots_in(found.bytes, MIB) == slots
    assert str(found) == f"{found.bytes / MIB:.0f} MiB of shared memory for saved KV ({found.because})"
    assert found.because.startswith(because)
