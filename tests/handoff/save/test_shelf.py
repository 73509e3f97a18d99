"""A shelf of embeddings: what it keeps and drops, and what pullers refuse."""

import time
from contextlib import closing
from copy import deepcopy

import numpy as np
import pytest

from baton.handoff import manifest as manifests
from baton.handoff.config import HandoffConfig
from baton.handoff.embeddings import RECORD_BYTES, Embeddings, Form
from baton.handoff.errors import (
    CompatibilityMismatch,
    DigestMismatch,
    HandoffError,
    MalformedManifest,
    NoCommonTransport,
    PullTimeout,
    StagingFull,
    WrongRequest,
)
from baton.handoff.load.embeddings import EmbeddingPuller
from baton.handoff.manifest import seal
from baton.handoff.save import sizing
from baton.handoff.save.shelf import Shelf
from baton.handoff.transports.base import Cancellation
from baton.prefix_keys import image_key
from baton.protos.handoff_pb2 import EmbeddingManifest
from harness.support import PATIENCE
from tests.handoff.caches import TRANSPORTS

FORM = Form("abc123", 1000, "float32")
ROWS = 50  # 200,000 bytes: four records, the last one in part
FITS = 3  # images of five records in a MiB, whose headers take some of it
A, B, C, D = (f"{'0' * 62}{n:02x}" for n in range(4))


@pytest.fixture(autouse=True)
def _one_mib(monkeypatch):
    monkeypatch.setattr(sizing, "EMBEDDINGS_BYTES", 1 << 20)


def shelf(lease_s=30.0):
    config = HandoffConfig("encoder", ["shm", "tcp"], "127.0.0.1", 0, None, "auto", lease_s=lease_s)
    made = Shelf(config, FORM.compatibility_hash)
    made.row_bytes = FORM.row_bytes
    return made


def image(seed=1, rows=ROWS):
    noise = np.random.default_rng(seed).integers(0, 256, rows * FORM.row_bytes, np.uint8)
    return Embeddings(noise, rows, FORM.width, FORM.dtype)


def put(shelf, *names, rows=80):
    for name in names:
        shelf.put(name, image(int(name, 16), rows))


def held(shelf, *names, rows=80):
    """Return which are there, without a lease or a use of them."""
    return [shelf._find(name, rows) is not None for name in names]


@pytest.fixture
def kept():
    with closing(shelf()) as made:
        yield made


@pytest.fixture
def unleased():
    with closing(shelf(lease_s=0.0)) as made:
        yield made


@pytest.fixture
def puller():
    with closing(EmbeddingPuller("prompts", FORM, ["shm", "tcp"])) as made:
        yield made


def pull(puller, manifest, name=A, rows=ROWS):
    return puller.pull(manifest, name, rows, Cancellation(time.monotonic() + 10 * PATIENCE))[0]


def manifest_of(shelf, name, rows=ROWS):
    found = shelf.manifest(name, rows)
    assert found is not None
    return deepcopy(found)


def offering(manifest, offer):
    """Leave a manifest one of its offers."""
    for other in set(manifest.shard.offers) - {offer}:
        del manifest.shard.offers[other]
    return seal(manifest)


@pytest.mark.parametrize("transport", [one for one in TRANSPORTS if isinstance(one, str)])
def test_what_is_put_is_what_comes(kept, transport):
    kept.put(A, image())
    with closing(EmbeddingPuller("prompts", FORM, [transport])) as puller:
        found, used = puller.pull(manifest_of(kept, A), A, ROWS, Cancellation(time.monotonic() + 10))
    assert used == transport
    assert (found.rows, found.width, found.dtype) == (ROWS, FORM.width, FORM.dtype)
    assert (found.data == image().data).all()


def test_the_least_recently_used_goes_when_room_is_needed(unleased):
    put(unleased, A, B, C)
    assert unleased.manifest(A, 80) is not None
    put(unleased, D)
    assert held(unleased, A, B, C, D) == [True, False, True, True]


def test_a_lease_and_a_reader_keep_an_image(kept, unleased):
    put(kept, A, B, C)
    assert not kept.has_room(80)
    with pytest.raises(StagingFull, match="add encode workers"):
        put(kept, D)
    assert held(kept, A, B, C) == [True] * FITS
    put(unleased, A, B, C)
    with unleased._staging.opened(*unleased._kept[A].entry.key):
        put(unleased, D)
        assert held(unleased, A, B, C, D) == [True, False, True, True]


def test_each_manifest_renews_the_lease(kept):
    put(kept, A, B, C)
    assert (kept.staged().handoffs, kept.size()[0]) == (3, 3)
    for one in kept._kept.values():
        one.leased_until = 0.0
    assert kept.staged().handoffs == 0
    kept.manifest(A, 80)
    assert (kept.staged().handoffs, kept.staged().bytes) == (1, 5 * RECORD_BYTES)
    put(kept, D)
    assert held(kept, A, B, C, D) == [True, False, True, True]


def test_a_lease_ends_once_all_have_released_it(kept):
    put(kept, A, B, C)
    first, second = manifest_of(kept, A, 80), manifest_of(kept, A, 80)
    kept.release(first)
    assert not kept.has_room(80)
    kept.release(second)
    kept.release(second)  # again
    assert kept.staged().handoffs == 2
    assert held(kept, A)  # until its room is needed
    put(kept, D)
    assert held(kept, A, B, C, D) == [False, True, True, True]
    kept.release(first)  # it is gone


def test_an_image_larger_than_the_shelf_drops_no_other(unleased):
    put(unleased, A, B)
    assert not unleased.has_room(1000)
    with pytest.raises(StagingFull):
        put(unleased, C, rows=1000)
    assert held(unleased, A, B) == [True, True]


def test_it_reports_what_came_and_went(unleased):
    put(unleased, A, B, C)
    change = unleased.take_changes()
    assert set(change.stored) == {image_key(name) for name in (A, B, C)}
    assert unleased.take_changes() is None
    put(unleased, D)
    change = unleased.take_changes()
    assert (change.stored, change.removed) == ([image_key(D)], [image_key(A)])


def test_another_number_of_rows_is_not_the_same_image(kept):
    kept.put(A, image())
    assert kept.manifest(A, ROWS + 1) is None
    kept.put(A, image(2, ROWS + 1))
    assert kept.manifest(A, ROWS) is None
    assert kept.manifest(A, ROWS + 1) is not None


def resealed(change):
    def changed(manifest):
        change(manifest)
        seal(manifest)

    return changed


WRONG = [
    (lambda m: setattr(m, "rows", m.rows + 1), MalformedManifest),  # not sealed again
    (lambda m: setattr(m, "digest", m.digest ^ 1), MalformedManifest),
    (resealed(lambda m: setattr(m, "identifier", B)), WrongRequest),
    (resealed(lambda m: setattr(m, "rows", ROWS + 1)), MalformedManifest),
    (resealed(lambda m: setattr(m, "width", 500)), MalformedManifest),
    (resealed(lambda m: setattr(m, "dtype", "bfloat16")), MalformedManifest),
    (resealed(lambda m: setattr(m, "compatibility_hash", "abc124")), CompatibilityMismatch),
    (resealed(lambda m: setattr(m, "num_records", m.num_records + 1)), MalformedManifest),
    (resealed(lambda m: setattr(m.shard, "record_bytes", RECORD_BYTES // 2)), MalformedManifest),
    (resealed(lambda m: setattr(m.shard, "rank", 1)), MalformedManifest),
    (resealed(lambda m: setattr(m.shard, "slots", 2)), MalformedManifest),
    (resealed(lambda m: setattr(m, "epoch", m.epoch + 1)), HandoffError),
    (resealed(lambda m: setattr(m.shard, "ticket", b"sixteen others ."[:16])), HandoffError),
    (resealed(lambda m: m.shard.offers.clear()), NoCommonTransport),
]


@pytest.mark.parametrize("offer", ["shm", "tcp"])
def test_changed_manifests_are_refused(kept, puller, offer):
    kept.put(A, image())
    for change, error in WRONG:
        manifest = offering(manifest_of(kept, A), offer)
        assert (pull(puller, manifest).data == image().data).all()
        change(manifest)
        with pytest.raises(error):
            pull(puller, manifest)


@pytest.mark.parametrize("offer", ["shm", "tcp"])
def test_another_images_records_are_refused(kept, puller, offer):
    """It is refused even if the shard and its ticket are right."""
    kept.put(A, image(1))
    kept.put(B, image(2))
    one, other = manifest_of(kept, A), manifest_of(kept, B)
    one.shard.CopyFrom(other.shard)
    with pytest.raises(HandoffError):
        pull(puller, offering(one, offer))
    one.epoch = other.epoch
    with pytest.raises(HandoffError):
        pull(puller, seal(one))


@pytest.mark.parametrize("offer", ["shm", "tcp"])
def test_a_changed_record_is_refused(kept, puller, offer):
    kept.put(A, image())
    manifest = offering(manifest_of(kept, A), offer)
    records = kept._kept[A].entry.view.records(0, 1)
    for at in (0, RECORD_BYTES // 2, RECORD_BYTES - 1):
        records[0, at] ^= 1
        with pytest.raises(DigestMismatch):
            pull(puller, manifest)
        records[0, at] ^= 1
    assert (pull(puller, manifest).data == image().data).all()


@pytest.mark.parametrize("offer", ["shm", "tcp"])
def test_a_dropped_image_is_refused(unleased, puller, offer):
    """It is refused also if the image is there again, as another copy."""
    put(unleased, A)
    manifest = offering(manifest_of(unleased, A, 80), offer)
    put(unleased, B, C, D)
    for _ in range(2):
        with pytest.raises(HandoffError):
            pull(puller, manifest, rows=80)
        put(unleased, A)
    assert (pull(puller, manifest_of(unleased, A, 80), rows=80).data == image(0, 80).data).all()


def test_an_earlier_encoders_manifest_is_refused(puller):
    with closing(shelf()) as before:
        before.put(A, image())
        manifest = manifest_of(before, A)
    with closing(shelf()) as after:
        after.put(A, image())
        manifest.shard.address = after._service.address
        assert (pull(puller, manifest_of(after, A)).data == image().data).all()
        for offer in ("shm", "tcp"):
            one = manifest_of(after, A)
            one.shard.CopyFrom(manifest.shard)
            with pytest.raises(HandoffError):
                pull(puller, offering(one, offer))


def test_a_late_pull_ends(kept, puller):
    kept.put(A, image())
    with pytest.raises(PullTimeout):
        puller.pull(manifest_of(kept, A), A, ROWS, Cancellation(time.monotonic() - 1))


def test_a_released_image_is_put_again(kept, puller):
    kept.put(A, image())
    manifest = manifest_of(kept, A)
    kept._staging.release(A, manifest.epoch)
    assert kept.manifest(A, ROWS) is None
    kept.put(A, image())
    assert (pull(puller, manifest_of(kept, A)).data == image().data).all()


def test_manifests_are_checked_before_anything_is_pulled():
    manifest = seal(EmbeddingManifest(identifier=A, worker_id="e"))
    with pytest.raises(CompatibilityMismatch, match="worker 'prompts'"):
        manifests.check_embedding(manifest, A, ROWS, FORM, "prompts")
