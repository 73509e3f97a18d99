import pytest

from baton.handoff import manifest as manifests
from baton.handoff.errors import CompatibilityMismatch, MalformedManifest, StaleEpoch, WrongRequest
from tests.handoff.caches import make_cache, puller, source

CACHE = make_cache(9)


@pytest.fixture
def manifest():
    made = source(CACHE)
    yield made.save("r", 70, [1, 2, 3])
    made.close()


def test_a_fitting_manifest_gives_this_ranks_shard(manifest):
    (share,) = manifests.check(manifest, "r", 1, puller(CACHE))
    assert (share.rank, share.readers, share.record_bytes) == (0, 1, manifest.shards[0].record_bytes)
    assert {cut.layer for cut in share.cuts} == set(range(len(CACHE.layers)))


WRONG = [
    (lambda m: setattr(m, "request_id", "other"), WrongRequest, "of request 'other'; wanted here: 'r'"),
    (lambda m: setattr(m, "epoch", 2), StaleEpoch, "epoch 2 .*wanted here: 1"),
    (
        lambda m: setattr(m, "compatibility_hash", "0"),
        CompatibilityMismatch,
        "hash 0; worker 'puller' has .*doctor",
    ),
    (lambda m: setattr(m, "num_tokens", 97), MalformedManifest, "num_blocks is 3; 4"),
    (lambda m: setattr(m.groups[0], "block_size", 16), MalformedManifest, "block_size of group 0 is 16; 32"),
    (lambda m: setattr(m.groups[0], "first_block", 1), MalformedManifest, "first_block of group 0 is 1; 0"),
    (lambda m: m.groups.add(), MalformedManifest, "number of groups is 2; 1"),
    (lambda m: setattr(m.shards[0], "record_bytes", 5), MalformedManifest, "record_bytes of shard 0 is 5"),
    (lambda m: setattr(m.shards[0], "rank", 1), MalformedManifest, "rank of shard 0 is 1; 0"),
    (lambda m: m.shards[0].layers.extend((0, 2)), MalformedManifest, "do not have each of 4 layers once"),
    (lambda m: m.shards.add(layers=(0, 1, 2, 3)), MalformedManifest, "record_bytes of shard 0 is .*; 0 is"),
    (lambda m: m.shards.pop(), MalformedManifest, "0 shards; layer .* comes from 1 ranks or not at all"),
    (lambda m: setattr(m, "wire_dtype", "int4"), MalformedManifest, "KV wire dtype 'int4' is not known"),
]


def test_a_manifest_that_was_changed_on_its_way_is_refused(manifest):
    assert manifests.is_of(manifest, "r", 1)
    assert not manifests.is_of(manifest, "r", 2)
    manifest.num_tokens += 1  # the number of blocks is the same
    with pytest.raises(MalformedManifest, match=r"wanted for request 'r', has digest .* sealed with"):
        manifests.check(manifest, "r", 1, puller(CACHE))
    assert not manifests.is_of(manifest, "r", 1)


@pytest.mark.parametrize(("spoil", "error", "text"), WRONG)
def test_misfits_are_refused_by_name(manifest, spoil, error, text):
    spoil(manifest)
    manifests.seal(manifest)
    with pytest.raises(error, match=text):
        manifests.check(manifest, "r", 1, puller(CACHE))
