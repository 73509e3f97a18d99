"""The index of blocks, compared with a model that keeps a set for each worker."""

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.prefix_keys import REMOVED, key_of, prompt_keys
from baton.scheduler.prefixes import sets
from baton.scheduler.prefixes.index import NAME, PrefixIndex, slots_of

PLENTY = 1 << 20


def chain(name, blocks):
    """Return the hashes of a chain of blocks; names with a common prefix give chains with a common prefix."""
    found, last = [], b""
    for number in range(blocks):
        last = hashlib.sha256(last + name[number : number + 1].encode()).digest()
        found.append(int.from_bytes(last))
    return found


def names(hashes):
    return [key_of(one, depth) for depth, one in enumerate(hashes, start=1)]


def common_length(one, other):
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def reach(index, keys, slot):
    return index.reach(keys, 1 << slot)[0]


@given(st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=12), st.text("ab", max_size=40))
def test_the_longest_match_of_chains_is_exact(held, asked):
    index = PrefixIndex(PLENTY)
    slots = {index.join(): one for one in held}
    for slot, one in slots.items():
        index.apply(slot, names(chain(one, len(one))))
    keys = names(chain(asked, len(asked)))
    common = {slot: common_length(one, asked) for slot, one in slots.items()}
    most = max(common.values())
    found, who = index.reach(keys, index.alive)
    assert found == most
    assert set(slots_of(who)) == ({slot for slot, at in common.items() if at == most} if most else set())
    for slot, at in common.items():
        assert reach(index, keys, slot) == at


class Model(RuleBasedStateMachine):
    """Random additions, removals, joins, leaves and sweeps."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex(PLENTY)  # so each block has its own shard
        self.held = {}
        self.keys = [key_of(chain(chr(one), 1)[0], one + 1) for one in range(24)]

    @rule()
    def come(self):
        if len(self.held) < 6:
            slot = self.index.join()
            assert slot not in self.held
            self.held[slot] = set()

    @rule(which=st.integers(0, 5), blocks=st.lists(st.integers(-24, 23), max_size=20), twice=st.booleans())
    def change(self, which, blocks, twice):
        if not self.held:
            return
        slot = sorted(self.held)[which % len(self.held)]
        for one in blocks:
            key = self.keys[one]
            (self.held[slot].discard if one < 0 else self.held[slot].add)(key)
        operations = [self.keys[one] | (REMOVED if one < 0 else 0) for one in blocks]
        for _ in range(1 + twice):
            self.index.apply(slot, operations)

    @rule(which=st.integers(0, 5))
    def go(self, which):
        if self.held:
            slot = sorted(self.held)[which % len(self.held)]
            self.index.leave(slot)
            del self.held[slot]

    @rule(entries=st.integers(1, 300))
    def sweep(self, entries):
        self.index.tend(entries)

    @invariant()
    def agrees(self):
        for key in self.keys:
            assert set(slots_of(self.index.holders(key))) == {
                slot for slot, held in self.held.items() if key in held
            }

    @invariant()
    def counts(self):
        held = set().union(*self.held.values())
        assert len(held) <= len(self.index) <= len(self.keys)

    def teardown(self):
        for slot in self.held:
            self.index.leave(slot)
        while self.index.tend(100):
            pass
        assert len(self.index) == 0
        assert len(self.index.sets) == 0


Model.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestModel = Model.TestCase


def test_blocks_of_removed_workers_are_swept():
    index = PrefixIndex(PLENTY)
    stays, goes = index.join(), index.join()
    keys = names(chain("a" * 400, 400))
    index.apply(stays, keys[:100])
    index.apply(goes, keys)
    index.leave(goes)
    assert reach(index, keys, stays) == 100
    assert index.reach(keys, index.alive) == (100, 1 << stays)
    while index.tend(50):
        assert index.reach(keys, index.alive) == (100, 1 << stays)
    assert len(index) == 100
    assert index.join() == goes  # the slot is reused
    assert reach(index, keys, goes) == 0


@given(
    st.integers(1, 40_000),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1 << 60), st.integers(0, 9)), max_size=300),
)
def test_an_index_of_any_size_is_correct(most, operations):
    index = PrefixIndex(most)
    slots = [index.join() for _ in range(5)]
    held = {}
    named = {}
    for worker, block_hash, what in operations:
        key = key_of(block_hash, 1)
        if named.setdefault(key & NAME, key) != key:
            continue  # both keys would have the same entry in an index of one shard
        (held.setdefault(key, set()).add if what else held.get(key, set()).discard)(slots[worker])
        index.apply(slots[worker], [key if what else key | REMOVED])
    assert len(index) <= max(most, index.shards)
    if index.coarseness == 1:
        for key, who in held.items():
            assert set(slots_of(index.holders(key))) == who


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-12, 11)), max_size=150))
def test_too_many_sets_only_lose_holders(changes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sets, "MOST_SHARED", 3)
        index = PrefixIndex(PLENTY)
        slots = [index.join() for _ in range(6)]
        keys = [key_of(chain(chr(one), 1)[0], one + 1) for one in range(12)]
        held = {key: set() for key in keys}
        for worker, one in changes:
            (held[keys[one]].discard if one < 0 else held[keys[one]].add)(slots[worker])
            index.apply(slots[worker], [keys[one] | (REMOVED if one < 0 else 0)])
            assert len(index.sets) <= 3
            for key in keys:
                assert set(slots_of(index.holders(key))) <= held[key]
        for slot in slots:
            index.apply(slot, [key | REMOVED for key in keys])
        assert len(index) == len(index.sets) == 0


def test_a_full_index_is_coarse_until_it_has_room_again():
    index = PrefixIndex(1_024)
    slot = index.join()
    draw = random.Random(1)
    prompts = [[draw.getrandbits(64) for _ in range(1_024)] for _ in range(8)]
    for hashes in prompts:
        index.apply(slot, names(hashes))
    assert len(index) <= 1_024
    assert index.coarseness > 1
    for hashes in prompts:  # only blocks at multiples of the coarseness are certain
        found = reach(index, list(prompt_keys(hashes, 1).keys), slot) * prompt_keys(hashes, 1).tokens
        assert 1_024 - index.coarseness < found <= 1_024
    for hashes in prompts:
        index.apply(slot, [key | REMOVED for key in names(hashes)])
    for hashes in prompts[:1]:
        for _ in range(8):
            index.apply(slot, names(hashes)[:64])
            index.apply(slot, [key | REMOVED for key in names(hashes)[:64]])
        index.apply(slot, names(hashes)[:64])
    assert reach(index, names(prompts[0])[:64], slot) == 64
