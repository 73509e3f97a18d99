"""A rank's loads, over a mock transport with faults and over real ones."""

import contextlib
import time

import numpy as np
import pytest

from baton.handoff import transports
from baton.handoff.groups import Part
from baton.handoff.load.pull import LoadJob
from baton.handoff.manifest import seal
from baton.handoff.transports.shm import offer_of
from harness.support import PATIENCE
from tests.handoff.caches import TRANSPORTS, make_cache, random_blocks, records, released, source, tensors
from tests.handoff.load.conftest import CACHE_BLOCKS
from tests.handoff.mock import Faults, Mock


@pytest.mark.parametrize("first", [0, 1, 9])
def test_a_load_brings_the_missing_blocks_and_releases_the_source(pair, first, eventually):
    blocks, into = random_blocks(CACHE_BLOCKS, 10, 1), random_blocks(CACHE_BLOCKS, 10 - first, 3)
    manifest = pair.source.save("r", 310, blocks)
    before = pair.landed(tuple(set(range(CACHE_BLOCKS)) - set(into)))
    pair.load(manifest, Part(0, first, into))
    done = pair.succeeds()
    assert (done.transport, done.blocks, done.bytes) == (
        "mock",
        10 - first,
        (10 - first) * manifest.shards[0].record_bytes,
    )
    assert np.array_equal(pair.landed(into), records(pair.source.cache, blocks[first:]))
    assert np.array_equal(pair.landed(tuple(set(range(CACHE_BLOCKS)) - set(into))), before)
    eventually(lambda: pair.source.staging.held() == (0, 0))
    assert min(done.costs.wait_ms, done.costs.move_ms, done.costs.check_ms, done.costs.load_ms) >= 0


@pytest.mark.parametrize("wire_dtype", ["fp8_e4m3", "int8"])
def test_a_quantised_load_is_close_to_the_saved_kv(pair):
    blocks, into = random_blocks(CACHE_BLOCKS, 10, 1), random_blocks(CACHE_BLOCKS, 10, 3)
    manifest = pair.source.save("r", 310, blocks)
    kv_bytes = sum(layer.block_bytes for layer in pair.source.cache.layers)
    assert manifest.shards[0].record_bytes < 0.5 * kv_bytes  # the drafter's layer is of float32
    pair.load(manifest, Part(0, 0, into))
    done = pair.succeeds()
    assert done.bytes == 10 * manifest.shards[0].record_bytes
    given, got = tensors(CACHE_BLOCKS, 1), pair.loader._cache._tables[0].blocks
    for one, flat in zip(given.values(), got, strict=True):
        was = one.as_strided((CACHE_BLOCKS, one.stride(0)), (one.stride(0), 1))[list(blocks)].float()
        error = (flat[list(into)].float() - was).abs().max()
        assert 0 < error < 0.3  # values of a normal distribution, up to 4.5, have an error of up to 1/16


FAULTS = [
    ({"corrupt_block": 4}, "DigestMismatch", "block 4 came with digest"),
    ({"corrupt_block": 9}, "DigestMismatch", "block 9 came with digest"),
    ({"truncate_at": 6}, "TransportFailed", "6 of 10 blocks came"),
    ({"truncate_at": 0}, "TransportFailed", "0 of 10 blocks came"),
    ({"fail_at": 5}, "TransportFailed", "broken on demand"),
]


@pytest.mark.parametrize(("faults", "name", "text"), FAULTS)
def test_a_faulty_transport_is_noticed_by_name(pair, mock, faults, name, text, eventually):
    manifest = pair.source.save("r", 310, random_blocks(CACHE_BLOCKS, 10))
    mock.faults = Faults(**faults)
    pair.load(manifest, Part(0, 0, random_blocks(CACHE_BLOCKS, 10, 3)))
    pair.fails(name, text, "'r'")
    eventually(lambda: pair.source.staging.held() == (0, 0))  # released


def test_another_requests_manifest_is_refused_and_not_released(pair, mock):
    manifest = pair.source.save("victim", 310, random_blocks(CACHE_BLOCKS, 10))
    for request_id, epoch, name in [("r", 1, "WrongRequest"), ("victim", 2, "StaleEpoch")]:
        pair.load(manifest, Part(0, 0, random_blocks(CACHE_BLOCKS, 10)), request_id=request_id, epoch=epoch)
        pair.fails(name)
    assert mock.pulls == []
    assert pair.source.staging.held()[0] == 1


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_stuck_pull_ends_in_time_and_is_reported_once(pair, mock, how, eventually):
    manifest = pair.source.save("r", 310, random_blocks(CACHE_BLOCKS, 10))
    mock.faults.delay_s = 60
    pair.loader._pull_timeout_s = 60 if how == "cancel" else 0.05
    start = time.monotonic()
    pair.load(manifest, Part(0, 0, random_blocks(CACHE_BLOCKS, 10)))
    if how == "cancel":
        eventually(lambda: bool(mock.pulls))
        pair.loader.cancel([("r", 1), ("r", 2), ("nobody", 1)])
    pair.fails("PullCancelled" if how == "cancel" else "PullTimeout")
    assert time.monotonic() - start < 2 * PATIENCE
    eventually(lambda: pair.source.staging.held() == (0, 0))
    pair.loader.cancel([("r", 1)])
    assert pair.loader.take_finished() == []


def test_a_silent_source_does_not_block_pulls_from_others(pair, mock):
    """Pulls from other sources overtake; those from the same source wait."""
    with contextlib.closing(source(make_cache(CACHE_BLOCKS, 1))) as other:
        Mock.sources[other.service.address] = other.staging
        mock.faults.silent = pair.source.service.address
        pair.loader._pull_timeout_s = 60.0
        for number in range(6):
            manifest = pair.source.save(f"silent {number}", 40, random_blocks(CACHE_BLOCKS, 2))
            pair.load(manifest, Part(0, 0, random_blocks(CACHE_BLOCKS, 2)), request_id=f"silent {number}")
        began = time.monotonic()
        for number in range(4):
            manifest = other.save(f"r{number}", 310, random_blocks(CACHE_BLOCKS, 10))
            manifest.worker_id = "other"
            seal(manifest)
            pair.load(manifest, Part(0, 0, random_blocks(CACHE_BLOCKS, 10)), request_id=f"r{number}")
        done = []
        while len(done) < 4:
            done += pair.loader.take_finished()
            assert time.monotonic() < began + 10 * PATIENCE
            time.sleep(0.01)
        assert [one.problem for one in done] == [None] * 4
        assert {one.request_id for one in done} == {f"r{number}" for number in range(4)}
        assert len([pull for pull in mock.pulls if pull.request_id.startswith("silent")]) == 2


def test_an_unexpected_failure_is_reported_too(pair, mock):
    manifest = pair.source.save("r", 310, random_blocks(CACHE_BLOCKS, 10))
    mock.faults.delay_s = "long"
    pair.load(manifest, Part(0, 0, random_blocks(CACHE_BLOCKS, 10)))
    pair.fails("TransportFailed", "TypeError")


def test_a_manifest_of_another_number_of_tokens_is_refused(pair, mock):
    """It is refused even if the number of blocks is equal."""
    manifest = pair.source.save("r", 310, random_blocks(CACHE_BLOCKS, 10))
    parts = (Part(0, 0, random_blocks(CACHE_BLOCKS, 10)),)
    job = LoadJob("r", 1, 309, parts, manifest=manifest, complete=True)
    pair.loader.reserve(job)
    pair.fails("MalformedManifest", "of 310 tokens; 309 were announced")
    assert mock.pulls == []


def test_a_mangled_manifest_releases_nothing(pair):
    """It may name another request's save."""
    manifest = pair.source.save("r", 310, random_blocks(CACHE_BLOCKS, 10))
    manifest.num_tokens = 311
    pair.load(manifest, Part(0, 0, random_blocks(CACHE_BLOCKS, 10)))
    pair.fails("MalformedManifest")
    released(pair.client, pair.source.save("behind it", 310, random_blocks(CACHE_BLOCKS, 10)))
    assert pair.source.staging.held()[0] == 1


@pytest.mark.parametrize("transport", ["mock", *TRANSPORTS])
@pytest.mark.parametrize("offered", [transports.possible()])
@pytest.mark.parametrize("first", [0, 3])
def test_a_save_of_several_runs_is_loaded(pair, transport, first, offered):
    if transport != "mock":
        pair.loader.transports[:] = transports.create([transport])
    staging = pair.source.staging
    places = [staging.reserve(f"{i}", 1, 1) for i in range(staging.capacity)]
    for place in [*places[5:9], *places[20:35:3], places[-1]]:
        staging.discard(place)
    blocks, into = random_blocks(CACHE_BLOCKS, 10, 1), random_blocks(CACHE_BLOCKS, 10 - first, 3)
    manifest = pair.source.save("r", 310, blocks)
    assert [run.count for run in offer_of(manifest.shards[0]).runs] == [4, 1, 1, 1, 1, 1, 1]
    pair.load(manifest, Part(0, first, into))
    done = pair.succeeds()
    assert (done.transport, done.blocks) == (transport, 10 - first)
    assert np.array_equal(pair.landed(into), records(pair.source.cache, blocks[first:]))
    pair.loader.transports[0].close()


def test_more_blocks_than_the_source_has_are_refused(pair):
    manifest = pair.source.save("r", 60, [1, 2])
    pair.load(manifest, Part(0, 1, (1, 2)))
    pair.fails("MalformedManifest")
