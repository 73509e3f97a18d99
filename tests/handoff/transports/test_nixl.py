"""The transport nixl: lost peers and their late bytes, buffers, and when it is used."""

import importlib.util
import ipaddress
import os
import signal
import time
from copy import deepcopy

import numpy as np
import psutil
import pytest

from baton import rpc
from baton.handoff import transports
from baton.handoff.errors import HandoffError, LeaseExpired, PullTimeout, TransportFailed
from baton.handoff.groups import Part
from baton.handoff.save.saver import SaveJob
from baton.handoff.transports import nixl as nixl_transport
from baton.handoff.transports import nixl_agent
from baton.handoff.transports.nixl import Nixl, offer_of
from baton.handoff.transports.nixl_agent import Agent
from baton.security.authority import Authority
from baton.security.identity import Identity, write
from baton.security.names import Name, Role
from harness.support import PATIENCE, freeze
from tests.handoff import caches
from tests.handoff.remote import RemoteSource
from tests.handoff.transports.test_transports import drain, pull_of

pytestmark = pytest.mark.skipif(bool(Nixl.hindrance()), reason=Nixl.hindrance())

BLOCKS = 41
LOST_S = 1.0 * PATIENCE  # time for a pull to end when its source is killed


@pytest.fixture(scope="module")
def nixl():
    made = Nixl()
    yield made
    made.close()


@pytest.fixture(scope="module")
def doomed():
    """A source for tests that stop it; the last one kills it."""
    made = RemoteSource()
    yield made
    made.kill()


@pytest.fixture
def source():
    """A source whose staging grows in steps of a few records."""
    cache = caches.make_cache(BLOCKS, 1)
    made = caches.source(cache, names=["nixl"], step_bytes=8 * cache.record_bytes)
    yield made
    made.close()


def test_an_offer_is_small(source):
    manifest = source.save("small", 16 * caches.BLOCK_SIZE, range(1, 17))
    assert len(offer_of(manifest.shards[0]).regions) >= 2
    assert len(manifest.shards[0].offers["nixl"]) < 2048


def test_a_save_in_several_steps_of_staging_comes_whole(source, nixl):
    """Each step is registered and read separately; a later save's offer has the new steps."""
    blocks = range(1, 31)
    for first, stop in ((0, 6), (6, 30)):
        own = blocks[first:stop]
        manifest = source.save(f"steps-{first}", len(own) * caches.BLOCK_SIZE, own)
        assert np.array_equal(drain(nixl, pull_of(manifest)), caches.records(source.cache, own))


def test_records_come_while_the_prompt_is_still_computed(source, nixl):
    blocks = (1, 2, 3, 4, 9, 8, 7, 6, 5)
    chunks = nixl.pull(pull_of(source.begin("early", blocks[:4], whole=9)))
    expected = caches.records(source.cache, blocks)
    there = came = 0
    for stop in (4, 6, 9):
        if there:
            part = Part(0, there, blocks[there:stop])
            source.saver.save(SaveJob("early", 1, (part,), whole=9, last=stop == 9))
        there = stop
        while came < there:
            records = next(chunks)
            assert records.first_block == came
            came += len(records.data)
            assert np.array_equal(records.data, expected[records.first_block : came])
        assert came == there
    assert next(chunks, None) is None


def test_an_aborted_prompt_ends_its_pull(source, nixl):
    chunks = nixl.pull(pull_of(source.begin("given-up", (1, 2), whole=9)))
    assert len(next(chunks).data) == 2
    source.saver.drop([("given-up", 1)])
    with pytest.raises(LeaseExpired, match=r"'given-up'.*no longer holds it"):
        next(chunks)


def test_a_source_that_hangs_ends_a_pull_at_its_deadline_and_can_be_read_later(doomed, eventually):
    manifest = doomed.save("hangs", range(1, 31))
    nixl, pid = Nixl(), doomed.process.pid
    expected = doomed.records(range(1, 31))
    assert np.array_equal(drain(nixl, pull_of(manifest)), expected)
    freeze(pid)
    with pytest.raises(PullTimeout):
        drain(nixl, pull_of(manifest, within_s=0.2))
    buffers = nixl._agent.buffers
    (buffer,) = buffers.left  # something may still be written to it
    assert buffers.free == []
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: buffers.free == [buffer])
    assert np.array_equal(drain(nixl, pull_of(manifest)), expected)
    nixl.close()


def test_a_source_that_never_answers_is_left_to_other_transports(doomed, monkeypatch):
    """This happens behind a firewall that lets only Baton's own ports through."""
    monkeypatch.setattr(nixl_agent, "CONTACT_S", 0.2)
    manifest = doomed.save("silent", range(1, 5))
    made, pid = transports.create(["nixl", "tcp"]), doomed.process.pid
    nixl, tcp = made
    assert transports.choose(made, manifest.shards[0]) is nixl
    freeze(pid)
    with pytest.raises(TransportFailed, match=r"no answer over NIXL within 0\.2 s: let UCX's ports through"):
        drain(nixl, pull_of(manifest, within_s=60 * PATIENCE))
    os.kill(pid, signal.SIGCONT)
    assert transports.choose(made, manifest.shards[0]) is tcp
    assert np.array_equal(drain(tcp, pull_of(manifest)), doomed.records(range(1, 5)))
    for one in made:
        one.close()


def test_a_killed_source_ends_pulls_at_once(doomed, nixl):
    """Pulls end that wait for the next step, that are in the middle, and that have just begun."""
    manifest, late = doomed.save("killed", range(1, 31)), 60 * PATIENCE
    whole = nixl.pull(pull_of(manifest, chunk_bytes=1, within_s=late))
    early = nixl.pull(pull_of(doomed.begin("steps", range(1, 3), whole=9), within_s=late))
    assert [len(next(chunks).data) for chunks in (whole, early)] == [1, 2]
    doomed.process.kill()
    for name, chunks in ("steps", early), ("killed", whole), ("killed", nixl.pull(pull_of(manifest))):
        began = time.monotonic()
        with pytest.raises(TransportFailed, match=rf"'{name}', epoch 1, rank 0 at .*: NIXL"):
            list(chunks)
        assert time.monotonic() - began < LOST_S


def test_buffers_come_in_few_sizes(nixl):
    """If buffers had exact sizes, each slightly larger pull would need a new one."""
    for size in (4097, 5000, 8192):
        with nixl._agent.buffer(size) as buffer:
            assert buffer.data.size >= size
            assert buffer.data.size.bit_count() == 1


def test_an_abandoned_pulls_buffer_is_reused_once_nothing_writes_to_it(source, nixl, eventually):
    manifest, buffers = source.save("left", 30 * caches.BLOCK_SIZE, range(1, 31)), nixl._agent.buffers
    others = set(buffers.left)
    chunks = nixl.pull(pull_of(manifest, chunk_bytes=1))
    next(chunks)
    free = len(buffers.free)
    chunks.close()
    eventually(lambda: len(buffers.free) > free and buffers.left.keys() <= others)


def test_another_agents_metadata_is_refused(source, nixl):
    manifest = source.save("misled", 4 * caches.BLOCK_SIZE, range(1, 5))
    misled = deepcopy(manifest)
    offer = offer_of(manifest.shards[0])
    offer.agent = "somebody else"
    misled.shards[0].offers["nixl"] = offer.SerializeToString()
    with pytest.raises(TransportFailed, match=r"refuses the metadata: .* is agent"):
        drain(nixl, pull_of(misled))
    assert np.array_equal(drain(nixl, pull_of(manifest)), caches.records(source.cache, range(1, 5)))


def test_a_busy_agent_polls_more_often_than_an_idle_one(monkeypatch):
    agent = Agent()
    pauses = []
    wait = agent._changed.wait

    def noted(timeout=None):
        pauses.append(timeout or 0.0)
        return wait(timeout)

    monkeypatch.setattr(agent._changed, "wait", noted)
    deadline = time.monotonic() + 10 * PATIENCE

    def pauses_are(seconds):
        pauses.clear()
        while len(pauses) < 3 or pauses[-1] != seconds:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    pauses_are(0.1)
    agent.begin("a save")
    pauses_are(0.001)
    agent.end("a save")
    pauses_are(0.1)
    agent.close()


@pytest.fixture(name="rdma")
def with_an_rdma_device(tmp_path, monkeypatch):
    """Pretend that this host has an RDMA device; NIXL still uses TCP."""
    device = tmp_path / "rdma" / "mlx5_0"
    device.mkdir(parents=True)
    monkeypatch.setattr(nixl_transport, "_RDMA", device.parent)
    return device


def test_it_is_used_by_default_if_there_is_a_device(rdma):
    assert transports.usable(None) == ["shm", "nixl", "tcp"]
    rdma.rmdir()
    assert transports.usable(None) == ["shm", "tcp"]
    assert transports.usable(["nixl"]) == ["nixl"]
    rdma.parent.rmdir()
    assert transports.usable(None) == ["shm", "tcp"]


@pytest.mark.usefixtures("rdma")
def test_without_the_package_it_is_not_used_by_default(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert transports.usable(None) == ["shm", "tcp"]
    made = transports.create()
    assert [one.name for one in made] == ["shm", "tcp"]
    for one in made:
        one.close()
    with pytest.raises(HandoffError, match=r"'nixl' cannot be used: .* pip install 'baton\[nixl\]'"):
        transports.create(["nixl", "tcp"])


@pytest.mark.usefixtures("rdma")
def test_with_tls_it_is_not_used_by_default(tmp_path):
    authority = Authority.create(tmp_path / "ca")
    write(tmp_path / "own", authority.issue(Name("baton", Role.WORKER, "w")))
    rpc.act_as(Identity(tmp_path / "own"))
    try:
        assert transports.usable(None) == ["shm", "tcp"]
        with pytest.raises(HandoffError, match=r"security\.tls is on, and NIXL neither encrypts"):
            transports.usable(["nixl"])
    finally:
        rpc.act_as(None)


@pytest.mark.usefixtures("rdma")
def test_if_nixl_cannot_start_it_is_not_used_by_default(monkeypatch, caplog):
    monkeypatch.setattr("nixl._api.nixl_agent", None)
    made = transports.create()
    assert [one.name for one in made] == ["shm", "tcp"]
    assert "'nixl' is not used: NIXL cannot start: TypeError" in caplog.text
    for one in made:
        one.close()
    with pytest.raises(HandoffError, match="NIXL cannot start: TypeError"):
        transports.create(["nixl"])


def test_it_listens_on_loopback_only(monkeypatch):
    """UCX's ports give access to the process's memory."""
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    before = listening()
    agent = Agent()
    try:
        opened = listening() - before
        assert opened
        assert all(ipaddress.ip_address(host).is_loopback for host, _ in opened)
    finally:
        agent.close()
    assert listening() <= before


def listening():
    return {
        (one.laddr.ip, one.laddr.port)
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }


def test_a_pull_that_outlives_its_transport_fails(source):
    """A NIXL handle that outlives its connection would crash the process."""
    manifest = source.save("outlived", 30 * caches.BLOCK_SIZE, range(1, 31))
    for _ in range(5):
        nixl = Nixl()
        pulls = [nixl.pull(pull_of(manifest, chunk_bytes=1)) for _ in range(3)]
        for chunks in pulls:
            next(chunks)  # the next one is on its way
        nixl.close()
        for chunks in pulls:
            with pytest.raises(TransportFailed):
                list(chunks)


def test_a_running_pull_keeps_its_peer_connected(source, nixl, monkeypatch):
    """A peer with running reads is not disconnected."""
    monkeypatch.setattr(nixl_agent, "_MAX_PEERS", 1)
    blocks = (1, 2, 3, 4, 9, 8, 7, 6, 5)
    chunks = nixl.pull(pull_of(source.begin("among-others", blocks[:4], whole=9)))
    came = [next(chunks).data.copy()]  # the buffer is lent for one chunk
    for _ in range(2):
        other = caches.source(caches.make_cache(BLOCKS, 1), names=["nixl"])
        try:
            manifest = other.save("other", 4 * caches.BLOCK_SIZE, range(1, 5))
            assert len(drain(nixl, pull_of(manifest))) == 4
        finally:
            other.close()
    source.saver.save(SaveJob("among-others", 1, (Part(0, 4, blocks[4:9]),), whole=9, last=True))
    came += [chunk.data.copy() for chunk in chunks]
    assert np.array_equal(np.concatenate(came), caches.records(source.cache, blocks))
