"""Loads of windowed saves over the real transports, and their acknowledgements."""

import grpc
import numpy as np
import pytest

from baton.handoff import transports
from baton.handoff.errors import ERROR_KEY
from baton.handoff.groups import Part
from baton.handoff.save.saver import SaveJob
from baton.protos import handoff_pb2 as pb
from tests.handoff.caches import (
    MIB,
    MIXED,
    make_cache,
    mixed_cache,
    pair_of,
    parts,
    random_blocks,
    records,
    source,
)

BLOCKS, RECORDS, SLOTS = 41, 30, 8
TOKENS = RECORDS * 32
FROM, INTO = random_blocks(BLOCKS, RECORDS, 1), random_blocks(BLOCKS, RECORDS, 3)


@pytest.fixture(params=["shm", "tcp"])
def pair(request):
    cache = make_cache(BLOCKS, 2)
    saving = source(make_cache(BLOCKS, 1), chunk_bytes=3 * cache.record_bytes)
    with pair_of(saving, cache, transports.create([request.param])) as made:
        yield made


def begin(pair, stop=RECORDS):
    """Save the first records of a prompt; return its manifest."""
    job = SaveJob("r", 1, (Part(0, 0, FROM[:stop]),), RECORDS, last=stop == RECORDS, slots=SLOTS)
    saved = pair.source.saver.save(job)
    return pair.source.manifest("r", TOKENS, RECORDS, saved)


def end(pair, first):
    """Save the prompt's records from `first` on."""
    return pair.source.saver.save(SaveJob("r", 1, (Part(0, first, FROM[first:]),), RECORDS, slots=SLOTS))


def calls(pair, monkeypatch):
    """Record the acknowledgements that reach the source."""
    heard = []
    take = pair.source.staging.take

    def hear(request_id, epoch, taken, wanted, reader):
        heard.append(taken)
        take(request_id, epoch, taken, wanted, reader)

    monkeypatch.setattr(pair.source.staging, "take", hear)
    return heard


def test_a_window_serves_more_records_than_it_has_slots(pair, monkeypatch, eventually):
    heard = calls(pair, monkeypatch)
    pair.load(begin(pair), Part(0, 0, INTO))
    done = pair.succeeds()
    assert done.blocks == RECORDS
    assert np.array_equal(pair.landed(INTO), records(pair.source.cache, FROM))
    assert heard == sorted(set(heard))
    assert 2 <= len(heard) <= RECORDS // (SLOTS // 4)
    eventually(lambda: pair.source.staging.held() == (0, 0))


def test_a_save_without_a_window_gets_no_acknowledgements(pair, monkeypatch):
    heard = calls(pair, monkeypatch)
    pair.load(pair.source.save("r", TOKENS, FROM), Part(0, 0, INTO))
    pair.succeeds()
    assert heard == []


def test_unwanted_records_are_skipped(pair, eventually):
    """Cached records are unwanted; there may be more of them than slots."""
    pair.load(begin(pair), Part(0, 3, INTO[3:5]), Part(0, 5, INTO[5:6]), Part(0, 19, INTO[19:29]))
    done = pair.succeeds()
    assert done.blocks == 13
    for part in (slice(3, 6), slice(19, 29)):
        assert np.array_equal(pair.landed(INTO[part]), records(pair.source.cache, FROM[part]))
    eventually(lambda: pair.source.staging.held() == (0, 0))


def test_an_early_load_takes_records_step_by_step(pair, eventually):
    manifest = begin(pair, stop=21)
    pair.load(manifest, Part(0, 0, INTO), early=True)
    eventually(lambda: pair.pulled() == 21)
    end(pair, 21)
    eventually(lambda: pair.source.staging.held() == (0, 0))
    pair.loader.complete(("r", 1), manifest)
    done = pair.succeeds()
    assert done.early_bytes == done.bytes
    assert np.array_equal(pair.landed(INTO), records(pair.source.cache, FROM))


def test_a_cancelled_early_load_that_took_records_ends_the_save(pair, eventually):
    """Another pull would not find all records."""
    manifest = begin(pair, stop=21)
    pair.load(manifest, Part(0, 0, INTO), early=True)
    eventually(lambda: pair.pulled() == 21)
    pair.loader.cancel([("r", 1)])
    assert pair.finished().problem is not None
    eventually(lambda: pair.source.staging.held() == (0, 0))
    late = end(pair, 21)
    assert late.problem.name == "UnknownHandoff"


def test_a_second_pull_of_taken_records_fails(pair, eventually):
    manifest = begin(pair)
    entry = pair.source.staging._entries["r", 1]
    for taken in (SLOTS, 2 * SLOTS):
        eventually(lambda taken=taken: entry.view.is_whole(taken - 1))
        pair.source.staging.take("r", 1, taken)
    eventually(lambda: entry.view.is_whole(3 * SLOTS - 1))
    pair.load(manifest, Part(0, 0, INTO))
    pair.fails("AlreadyTaken")
    eventually(lambda: pair.source.staging.held() == (0, 0))


def test_a_failed_acknowledgement_ends_the_load(pair, monkeypatch):
    def deaf(*_):
        raise RuntimeError("broken on demand")

    monkeypatch.setattr(pair.source.staging, "take", deaf)
    pair.load(begin(pair), Part(0, 0, INTO))
    pair.fails("TransportFailed", "the acknowledgement failed: UNKNOWN")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ticket": b""}, "WrongTicket"),
        ({"ticket": b"x" * 16}, "WrongTicket"),
        ({"request_id": "else"}, "WrongTicket"),
        ({"epoch": 2}, "WrongTicket"),
        ({"taken": 2**32 - 1}, "MalformedManifest"),
        ({"taken": SLOTS + 1}, "MalformedManifest"),
        ({"taken": 2}, "MalformedManifest"),
        ({"wanted": RECORDS + 1}, "MalformedManifest"),
    ],
)
def test_wrong_calls_change_nothing(pair, change, error, eventually):
    manifest = begin(pair, stop=SLOTS)
    entry = pair.source.staging._entries["r", 1]
    eventually(lambda: entry.view.is_whole(SLOTS - 1))
    (shard,) = manifest.shards
    right = pb.TakenRequest(request_id="r", epoch=1, ticket=shard.ticket, taken=3)
    pair.client.call("Taken", shard.address, right, 20).result()
    wrong = pb.TakenRequest.FromString(right.SerializeToString())
    for key, value in change.items():
        setattr(wrong, key, value)
    with pytest.raises(grpc.RpcError) as refused:
        pair.client.call("Taken", shard.address, wrong, 20).result()
    assert dict(refused.value.trailing_metadata())[ERROR_KEY] == error
    assert entry.taken == 3
    end(pair, SLOTS)
    found = []
    for chunk in pair.source.staging.read("r", 1, (3, RECORDS - 3), 1):
        found.append(chunk.data.copy())
        pair.source.staging.take("r", 1, chunk.first_block + 1)
    assert np.array_equal(np.concatenate(found), records(pair.source.cache, FROM[3:]))


def test_all_groups_go_through_one_window():
    tokens = 640
    count = sum(len(group.live(tokens)) for group in MIXED)
    blocks, into = random_blocks(BLOCKS, count, 1), random_blocks(BLOCKS, count, 3)
    cache, saving = mixed_cache(BLOCKS, 2), source(mixed_cache(BLOCKS, 1), groups=MIXED)
    with pair_of(saving, cache, transports.create(["shm"]), MIB) as pair:
        saved = saving.saver.save(SaveJob("r", 1, parts(MIXED, tokens, blocks), slots=SLOTS))
        assert saved is not None
        pair.load(saving.manifest("r", tokens, count, saved), *parts(MIXED, tokens, into))
        pair.succeeds()
        for there, here in zip(parts(MIXED, tokens, blocks), parts(MIXED, tokens, into), strict=True):
            wanted = records(saving.cache, there.block_ids, there.group)
            assert np.array_equal(records(cache, here.block_ids, here.group), wanted)
