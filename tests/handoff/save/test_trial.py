"""Trials: test payloads between ranks."""

import functools
from contextlib import closing

import pytest

from baton.handoff import transports
from baton.handoff.channels import HandoffClient
from baton.handoff.memory.arena import Arena
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.handoff.save.trial import Trials
from baton.kernels import kv_pack
from tests.handoff.caches import TRANSPORTS

MIB = 1 << 20
RECORD = 8192


class Rank:
    def __init__(self, names):
        self.transports = transports.create(names)
        pin = functools.partial(transports.register, self.transports)
        self.staging = Staging(Arena(8 * MIB, RECORD, pin=pin), 30.0)
        self.client = HandoffClient()
        self.trials = Trials(self.staging, self.transports, self.client, rank=0, chunk_bytes=MIB)
        self.service = HandoffService(self.staging, 0, "127.0.0.1:0", MIB, trials=self.trials)

    def close(self):
        self.service.close(0)
        self.staging.close()
        for transport in self.transports:
            transport.close()
        self.client.close()


@pytest.fixture
def names():
    return ["shm", "tcp"]


@pytest.fixture
def source(names):
    with closing(Rank(names)) as made:
        yield made


@pytest.fixture
def puller(names):
    with closing(Rank(names)) as made:
        yield made


def trial(puller, source, transport, size=MIB // 2):
    """Start a trial as a worker does: over gRPC."""
    return puller.client.try_handoff([puller.service.local_address], [source], transport, size, 10)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("names", [transports.possible()])
def test_it_measures_what_it_pulled(source, puller, transport, names, eventually):
    reply = trial(puller, source.service.address, transport)
    assert (reply.problem, reply.bytes) == ("", MIB // 2)
    assert 0 < reply.seconds < 10
    eventually(lambda: source.staging.held() == (0, 0))  # released, as a handoff is


def test_bytes_that_changed_on_the_way_are_a_problem(source, puller, monkeypatch):
    sample = source.trials.sample

    def broken(size):
        reply = sample(size)
        with source.staging.opened(reply.request_id, 1) as entry:
            entry.view.records(1, 2)[0, 7] ^= 1
        return reply

    monkeypatch.setattr(source.trials, "sample", broken)
    reply = trial(puller, source.service.address, "tcp")
    assert reply.problem.startswith("DigestMismatch:")
    assert reply.bytes == 0


def test_problems_are_named(source, puller):
    assert "does not offer 'rdma'" in trial(puller, source.service.address, "rdma").problem
    source.service.close(0)
    assert "does not answer" in trial(puller, source.service.address, "tcp").problem


def test_a_sample_that_fails_leaves_nothing(source, monkeypatch):
    def broken(*_):
        raise MemoryError

    monkeypatch.setattr(kv_pack, "digest", broken)
    free = source.staging.free_blocks
    with pytest.raises(MemoryError):
        source.trials.sample(MIB)
    assert source.staging.free_blocks == free
    assert source.staging.held() == (0, 0)


def test_samples_are_bounded(source):
    """A sample leaves most of staging free for prompts."""
    assert source.trials.sample(1 << 40).num_blocks == source.staging.capacity // 8
    for _ in range(12):
        source.trials.sample(1 << 40)
    samples, held = source.staging.held()
    assert samples == 4
    assert held < source.staging.capacity_bytes / 2
    assert source.trials.sample(1).num_blocks == 1
