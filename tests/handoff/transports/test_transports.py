"""The real transports between two processes."""

import time
from contextlib import closing
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from baton.handoff import transports
from baton.handoff.channels import HandoffClient
from baton.handoff.errors import (
    HandoffError,
    LeaseExpired,
    MalformedManifest,
    NoCommonTransport,
    PullCancelled,
    PullTimeout,
    TransportFailed,
    UnknownHandoff,
    WrongTicket,
)
from baton.handoff.memory import segments
from baton.handoff.transports.base import Cancellation, Pull
from baton.handoff.transports.shm import Shm, offer_of
from tests.handoff.caches import TRANSPORTS, random_blocks, released
from tests.handoff.remote import CACHE_BLOCKS, RemoteSource

BLOCKS = 20


@pytest.fixture(scope="module")
def source():
    made = RemoteSource()
    yield made
    made.close()


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    (made,) = transports.create([request.param])
    yield made
    made.close()


@pytest.fixture
def client():
    with closing(HandoffClient()) as made:
        yield made


def pull_of(manifest, first=0, count=None, within_s=10, **changes):
    shard = manifest.shards[0]
    pull = Pull(
        request_id=manifest.request_id,
        epoch=manifest.epoch,
        shard=shard,
        first_block=first,
        saved_blocks=manifest.num_blocks,
        num_blocks=manifest.num_blocks - first if count is None else count,
        chunk_bytes=200_000,
        cancellation=Cancellation(time.monotonic() + within_s),
    )
    return replace(pull, **changes)


def drain(transport, pull):
    got = []
    expected = pull.first_block
    for records in transport.pull(pull):
        assert records.first_block == expected
        expected += len(records.data)
        got.append(records.data.copy())
    return np.concatenate(got)


@pytest.mark.parametrize(("first", "count"), [(0, 20), (0, 1), (19, 1), (7, 13), (3, 2)])
@pytest.mark.parametrize("seed", [2, 3])
def test_whole_and_partial_pulls_bring_the_saved_bytes(source, transport, first, count, seed):
    blocks = random_blocks(CACHE_BLOCKS, BLOCKS, seed)
    manifest = source.save(f"whole-{first}-{count}-{seed}-{transport.name}", blocks)
    assert transport.reaches(manifest.shards[0])
    got = drain(transport, pull_of(manifest, first, count))
    assert np.array_equal(got, source.records(blocks[first : first + count]))


def test_another_epoch_and_another_request_are_refused(source, transport):
    saved = source.save(f"epochs-{transport.name}", range(5, 9), epoch=2)
    for change in ({"epoch": 1}, {"request_id": "somebody else"}):
        with pytest.raises((LeaseExpired, WrongTicket)):
            drain(transport, pull_of(saved, **change))
    assert np.array_equal(drain(transport, pull_of(saved)), source.records(range(5, 9)))


def test_without_its_ticket_nothing_comes_and_nothing_is_released(source, transport, client):
    """A request's id, epoch and place are not enough."""
    saved = source.save(f"ticket-{transport.name}", range(5, 9))
    others = source.save(f"other-{transport.name}", range(9, 13))
    right = saved.shards[0].ticket
    held = source.held()[0]
    for ticket in (b"", others.shards[0].ticket, right[:-1], right + b"\0", bytes(16)):
        guessed = deepcopy(saved)
        guessed.shards[0].ticket = ticket
        with pytest.raises((LeaseExpired, WrongTicket), match=f"'ticket-{transport.name}'.*ticket"):
            drain(transport, pull_of(guessed))
        assert not released(client, guessed)
        assert client.renew([guessed]) == set()
    assert source.held()[0] == held
    assert client.renew([saved]) == {(saved.request_id, saved.epoch)}
    assert np.array_equal(drain(transport, pull_of(saved)), source.records(range(5, 9)))


def test_a_released_save_cannot_be_pulled(source, transport, client):
    manifest = source.save(f"released-{transport.name}", range(1, 5))
    before, _ = source.held()
    assert client.staged([manifest.shards[0].address]).handoffs == before
    assert released(client, manifest, confirmed=True)
    assert not released(client, manifest)
    assert source.held()[0] == before - 1
    with pytest.raises(UnknownHandoff if transport.name == "tcp" else LeaseExpired):
        drain(transport, pull_of(manifest))


@pytest.mark.parametrize("transport", TRANSPORTS[:-1], indirect=True)
def test_memory_released_under_a_reader_is_noticed(source, transport, client):
    """Readers find that the ticket is gone."""
    manifest = source.save(f"under-the-reader-{transport.name}", range(1, 31))
    chunks = transport.pull(pull_of(manifest, chunk_bytes=1))
    next(chunks)
    released(client, manifest)
    with pytest.raises(LeaseExpired, match="no longer holds it"):
        next(chunks)


def test_a_pull_beyond_the_end_or_its_deadline_fails(source, transport):
    manifest = source.save(f"beyond-{transport.name}", range(1, 5))
    with pytest.raises((MalformedManifest, TransportFailed)):
        drain(transport, pull_of(manifest, 2, 10_000))
    with pytest.raises(PullTimeout):
        drain(transport, pull_of(manifest, within_s=0))


def test_a_cancelled_pull_ends_at_once(source, transport):
    manifest = source.save(f"cancelled-{transport.name}", range(1, 31))
    pull = pull_of(manifest, chunk_bytes=1)
    chunks = transport.pull(pull)
    next(chunks)
    pull.cancellation.set()
    with pytest.raises(PullCancelled):
        list(chunks)


def test_a_dead_source(own_folder, transport, client):
    """Its service is gone, but its shared memory can be read until the name is removed."""
    doomed = RemoteSource()
    manifest = doomed.save("dead", range(1, 5))
    expected = doomed.records(range(1, 5))
    doomed.kill()
    if transport.name == "shm":
        assert np.array_equal(drain(transport, pull_of(manifest)), expected)
        transport.close()  # forgets the mapping
    assert offer_of(manifest.shards[0]).segment in segments.remove_stale()
    with pytest.raises(TransportFailed):
        drain(transport, pull_of(manifest, within_s=5))
    assert not released(client, manifest)


def test_the_first_transport_of_the_pullers_list_that_reaches_is_chosen(source):
    shard = source.save("chosen", range(1, 3)).shards[0]
    shard.offers.pop("nixl", None)
    shm, tcp = transports.create(["shm", "tcp"])
    assert transports.choose([shm, tcp], shard) is shm
    assert transports.choose([tcp, shm], shard) is tcp
    elsewhere = offer_of(shard)
    elsewhere.host = "another machine"
    shard.offers["shm"] = elsewhere.SerializeToString()
    assert transports.choose([shm, tcp], shard) is tcp
    with pytest.raises(NoCommonTransport, match=r"offers shm, tcp; none of this .* reaches it: shm$"):
        transports.choose([shm], shard)
    shard.offers["shm"] = b"\xff"
    with pytest.raises(MalformedManifest, match="its offer of shm"):
        transports.choose([shm], shard)
    shard.offers.clear()
    with pytest.raises(NoCommonTransport, match="offers nothing; "):
        transports.choose([shm, tcp], shard)
    tcp.close()


def test_transports_are_found_by_their_names(monkeypatch):
    assert transports.REGISTRY.names() == ["nixl", "shm", "tcp"]
    with pytest.raises(HandoffError, match="there is no handoff transport 'rdma'; there are: nixl, shm, tcp"):
        transports.create(["rdma"])
    with pytest.raises(HandoffError, match=r"'grpc' any more; write 'tcp' instead$"):  # its former name
        transports.create(["shm", "grpc"])
    monkeypatch.setattr(Shm, "name", "memory")
    with pytest.raises(HandoffError, match="'shm' calls itself 'memory'"):
        transports.create(["shm"])
