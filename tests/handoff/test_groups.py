"""The live blocks of each group, and their places in a save."""

import pytest

from baton.handoff.groups import (
    CacheGroup,
    Part,
    described,
    final_part,
    final_records,
    in_order,
    loaded_parts,
    num_blocks,
    num_records,
    parts_from,
    runs,
    saved_parts,
    serve,
)

FULL, WINDOW, STATE = CacheGroup(32), CacheGroup(32, window=64), CacheGroup(512, state="state of gdn")
RING, CHUNK = CacheGroup(8, state="ring of 8 tokens"), CacheGroup(32, chunk=64)
ALL = (FULL, WINDOW, STATE)
TABLES = ([*range(1, 11)], [0, 0, *range(11, 19)], [40])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_blocks_of_tokens(tokens, blocks):
    assert num_blocks(tokens, 32) == blocks


@pytest.mark.parametrize(
    ("group", "tokens", "live"),
    [
        (FULL, 300, range(10)),
        (WINDOW, 63, range(2)),
        (WINDOW, 94, range(3)),  # the next token attends to 31 .. 94
        (WINDOW, 95, range(1, 3)),
        (WINDOW, 300, range(7, 10)),
        (CacheGroup(32, window=1), 64, range(2, 2)),  # attends only to itself
        (STATE, 1, range(1)),
        (STATE, 512, range(1)),
        (RING, 0, range(0)),
        (RING, 300, range(1)),  # overwritten in place
        (CHUNK, 63, range(2)),  # the next token is the chunk's last
        (CHUNK, 64, range(2, 2)),  # the next token begins a chunk
        (CHUNK, 65, range(2, 3)),
        (CHUNK, 300, range(8, 10)),
    ],
)
def test_live_blocks(group, tokens, live):
    assert group.live(tokens) == live


def test_which_saves_serve_a_number_of_tokens():
    assert STATE.serves(100, 100)
    assert not STATE.serves(100, 99)
    assert FULL.serves(100, 1)
    assert not FULL.serves(100, 101)
    assert WINDOW.serves(100, 96)
    assert not WINDOW.serves(95, 94)  # it has passed its first block
    assert CHUNK.serves(65, 64)
    assert not CHUNK.serves(64, 63)  # it still attends to the last chunk
    assert serve(ALL, 100, 100)
    assert not serve(ALL, 100, 99)


def test_a_save_has_the_live_blocks_group_after_group():
    parts = saved_parts(ALL, TABLES, 300)
    assert parts == (Part(0, 0, tuple(range(1, 11))), Part(1, 10, (16, 17, 18)), Part(2, 13, (40,)))
    assert num_records(ALL, 300) == 14 == parts[-1].stop
    assert runs(parts) == [(0, 14)]
    assert [(one.first_block, one.num_blocks) for one in described(ALL, 300)] == [(0, 10), (7, 3), (0, 1)]


def test_cached_tokens_are_not_loaded():
    parts = loaded_parts(ALL, TABLES, 300, 300, 256)
    assert parts == (Part(0, 8, (9, 10)), Part(1, 11, (17, 18)), Part(2, 13, (40,)))
    assert runs(parts) == [(8, 10), (11, 14)]
    assert runs(loaded_parts((FULL,), TABLES[:1], 300, 300, 256)) == [(8, 10)]
    parts = loaded_parts((FULL, WINDOW), TABLES[:2], 300, 299, 0)
    assert parts == (Part(0, 0, tuple(range(1, 11))), Part(1, 10, (16, 17, 18)))


def test_a_part_within_places():
    part = Part(1, 10, (16, 17, 18))
    assert part.within(0, 99) == part
    assert part.within(11, 12) == Part(1, 11, (17,))
    assert part.within(0, 5).block_ids == part.within(13, 20).block_ids == ()


def test_groups_that_keep_all_tokens_come_first():
    mixed = (STATE, WINDOW, FULL)
    assert in_order(mixed) == [2, 0, 1]
    assert [final_records(mixed, tokens) for tokens in (31, 32, 300)] == [0, 1, 9]
    assert final_records((WINDOW, STATE), 300) == 0
    tables = ([40], [0, 0, *range(11, 19)], [*range(1, 11)])
    parts = saved_parts(mixed, tables, 300)
    assert [(part.group, part.first) for part in parts] == [(2, 0), (0, 10), (1, 11)]
    assert final_part(mixed, tables, 0, 4) == Part(2, 0, (1, 2, 3, 4))
    assert final_part(mixed, tables, 4, 9) == Part(2, 4, (5, 6, 7, 8, 9))
    assert parts_from(parts, 9) == (Part(2, 9, (10,)), *parts[1:])
    assert parts_from(parts, 0) == parts
