"""The keys of KV blocks."""

from hypothesis import given
from hypothesis import strategies as st

from baton.prefix_keys import MOST_KEYS, image_key, key_of, level_of, prompt_keys


@given(st.integers(1, 1 << 40))
def test_levels(depth):
    level = level_of(depth)
    assert depth % (1 << level) == 0
    assert level == 15 or depth % (1 << (level + 1))
    assert key_of((1 << 256) - 1, depth) < 1 << 60


@given(st.integers(0, 20_000))
def test_a_prompt_has_few_keys_at_equal_distances(blocks):
    hashes = [number << 8 for number in range(blocks)]
    keys, tokens = prompt_keys(hashes, 16)
    stride = tokens // 16
    assert len(keys) == blocks // stride <= MOST_KEYS
    assert stride & (stride - 1) == 0
    assert blocks // stride >= MOST_KEYS // 2 or stride == 1
    every = [key_of(one, depth) for depth, one in enumerate(hashes, start=1)]
    assert list(keys) == every[stride - 1 :: stride]


@given(st.binary(min_size=32, max_size=32), st.sampled_from(["", "adapter:"]))
def test_an_images_key_is_of_its_hash_and_has_the_highest_level(digest, adapter):
    key = image_key(adapter + digest.hex())
    assert (key & 0xF, key >> 4) == (15, int.from_bytes(digest[-8:]) >> 4 & (1 << 56) - 1)
