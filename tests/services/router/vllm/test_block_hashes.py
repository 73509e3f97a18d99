"""A router names a prompt's blocks as the engines do."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from baton.prefix_keys import key_of
from baton.protos import scheduler_pb2
from baton.services.router.vllm import block_hashes
from baton.services.router.vllm.block_hashes import PIECE_BLOCKS, PromptHasher
from tests.services.worker.router import request

BLOCK = 16
ADAPTER = LoRARequest("sql", 3, "a5ce55ed")
OTHER_FILES = LoRARequest("sql", 3, "f00")


def hasher(every=1, algorithm="sha256"):
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    root = kv_cache_utils.NONE_HASH
    return PromptHasher(scheduler_pb2.BlockHashing(tokens=BLOCK, algorithm=algorithm, root=root, every=every))


def asked(tokens, salt=None, adapter=None, features=()):
    one = request("r", tokens)
    one.mm_features = list(features) or None
    one.cache_salt = salt
    one.lora_request = adapter
    return one


def feature(name, place):
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(place.start, len(place)), name)


def in_an_engine(tokens, salt, algorithm, adapter=None, features=()):
    """Hash as the engine does when the request arrives."""
    made = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        lora_request=adapter,
        mm_features=list(features) or None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, get_hash_fn_by_name(algorithm)),
    )
    return [int.from_bytes(one[-8:], "big") for one in made.block_hashes]


@pytest.mark.parametrize("salt", [None, "acme"])
@pytest.mark.parametrize("adapter", [None, ADAPTER])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_hashes_are_the_engines_own(salt, algorithm, adapter):
    draw = random.Random(1)
    one = hasher(algorithm=algorithm)
    for length in (1, BLOCK - 1, BLOCK, 3 * BLOCK + 1, (2 * PIECE_BLOCKS + 3) * BLOCK + 5):
        tokens = [draw.randrange(150_000) for _ in range(length)]
        expected = in_an_engine(tokens, salt, algorithm, adapter)
        assert len(expected) == length // BLOCK
        assert list(one.hashes(asked(tokens, salt, adapter))) == expected
        assert list(one.hashes(asked(tokens, salt, adapter))) == expected  # these come from the cache


@st.composite
def prompts_with_images(draw):
    """Up to three images at any places, among runs of equal tokens, as placeholders are."""
    features, end = [], 0
    for _ in range(draw(st.integers(0, 3))):
        begin = end + draw(st.integers(0, 40))
        end = begin + draw(st.integers(1, 80))
        features.append(feature(draw(st.sampled_from("abc")), range(begin, end)))
    return [7] * (end + draw(st.integers(0, PIECE_BLOCKS * BLOCK + 40))), features


def test_images_are_named_as_in_an_engine():
    one = hasher()  # keeps pieces of earlier prompts, which must not be taken for those of another image

    @given(prompts_with_images(), st.sampled_from([None, "acme"]), st.sampled_from([None, ADAPTER]))
    @settings(max_examples=150, deadline=None)
    def check(prompt, salt, adapter):
        tokens, features = prompt
        found = list(one.hashes(asked(tokens, salt, adapter, features)))
        assert found == in_an_engine(tokens, salt, "sha256", adapter, features)

    check()


def test_only_the_new_part_of_a_prompt_is_hashed(monkeypatch):
    one, hashed = hasher(), []
    inner = block_hashes.hash_block_tokens

    def counted(*args):
        hashed.append(args)
        return inner(*args)

    monkeypatch.setattr(block_hashes, "hash_block_tokens", counted)
    tokens = list(range(10 * PIECE_BLOCKS * BLOCK))
    first = one.hashes(asked(tokens))
    assert len(hashed) == 10 * PIECE_BLOCKS
    del hashed[:]
    longer = one.hashes(asked([*tokens, *range(3 * BLOCK)]))
    assert (len(hashed), longer[: len(first)]) == (3, first)
    del hashed[:]
    one.hashes(asked([*tokens[:-1], 7]))
    assert len(hashed) == PIECE_BLOCKS
    other = one.hashes(asked(tokens, "acme"))
    assert set(other).isdisjoint(first)


def test_each_adapter_has_its_own_names():
    """Each block's name depends on the adapter's files, not just on its name or its number at a worker."""
    one, tokens = hasher(), list(range(2 * PIECE_BLOCKS * BLOCK))
    names = [one.hashes(asked(tokens, adapter=adapter)) for adapter in (None, ADAPTER, OTHER_FILES)]
    assert len({*names[0], *names[1], *names[2]}) == 3 * 2 * PIECE_BLOCKS
    assert one.hashes(asked(tokens, adapter=LoRARequest("sql", 1, "a5ce55ed"))) == names[1]


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(block_hashes, "PIECES", 4)
    one = hasher()
    for begin in range(6):
        one.keys(asked([begin] * (2 * PIECE_BLOCKS * BLOCK)))
    assert len(one._pieces) == 4


def test_a_longer_cache_block_is_named_by_its_last_hash():
    tokens = list(range(9 * BLOCK))
    hashes = hasher().hashes(asked(tokens))
    keys, apart = hasher(every=4).keys(asked(tokens))
    assert (keys, apart) == ((key_of(hashes[3], 1), key_of(hashes[7], 2)), 4 * BLOCK)
