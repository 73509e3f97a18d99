"""The keys of KV blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.prefix_keys import MOST_KEYS, key_of, level_of, prompt_keys


@given(st.integers(1, 1 << 40))
def test_levels(depth: int) -> None:
    level = level_of(depth)
    assert depth % (1 << level) == 0
    assert level == 15 or depth % (1 << (level + 1))
    assert key_of((1 << 256) - 1, depth) < 1 << 60


@given(st.integers(0, 20_000))
def test_a_prompt_has_few_keys_at_equal_distances(blocks: int) -> None:
    hashes = [number << 8 for number in range(blocks)]
    keys, tokens = prompt_keys(hashes, 16)
    stride = tokens // 16
    assert len(keys) == blocks // stride <= MOST_KEYS
    assert stride & (stride - 1) == 0
    assert blocks // stride >= MOST_KEYS // 2 or stride == 1
    assert (
        list(keys) == [key_of(one, depth) for depth, one in enumerate(hashes, start=1)][stride - 1 :: stride]
    )
