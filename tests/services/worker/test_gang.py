"""A worker's place in a gang follows from its settings."""

import asyncio

import pytest

from baton.protos.scheduler_pb2 import Gang, WorkerIdentity
from baton.services.config import load
from baton.services.errors import ConfigError, StartError
from baton.services.worker.gang import LOOPBACK, _facts, gang_of, is_limb, own_host


def settings(size, gang, rank, **engine):
    worker = {"gang": f"{gang}/{rank}" if gang else ""}
    return load({"engine": {"data_parallel_size": size} | engine, "worker": worker})


def test_its_place():
    assert gang_of(settings(1, "", 0)) is None
    assert gang_of(settings(3, "decode-0", 2)) == Gang(name="decode-0", rank=2, size=3)


@pytest.mark.parametrize(
    ("size", "nodes", "ranks"),
    [(1, 2, [0, None]), (2, 2, [0, 1]), (4, 2, [0, 1, 2, 3]), (2, 4, [0, None, 1, None])],
)
def test_members_on_several_machines(size, nodes, ranks):
    """The scheduler sees workers, not limbs. `ranks`: the expected ranks; None for a limb."""
    for rank, expected in enumerate(ranks):
        one = settings(size, "g", rank, nodes=nodes, tensor_parallel_size=2)
        assert is_limb(one) == (expected is None)
        if expected is not None:
            assert gang_of(one) == Gang(name="g", rank=expected, size=size)
    with pytest.raises(ConfigError, match=rf"and engine\.nodes {nodes}: ranks are 0 to {len(ranks) - 1}$"):
        gang_of(settings(size, "g", len(ranks), nodes=nodes, tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("size", "gang", "rank", "why"),
    [
        (1, "decode-0", 0, r"^worker\.gang \(value 'decode-0/0'\): engine\.data_parallel_size is 1"),
        (2, "", 0, r"^engine\.data_parallel_size is 2, and this worker has no gang: set worker\.gang"),
        (2, "decode-0", 2, r"^worker\.gang \(value 'decode-0/2'\): .* ranks are 0 to 1"),
    ],
)
def test_settings_that_disagree(size, gang, rank, why):
    with pytest.raises(ConfigError, match=why):
        gang_of(settings(size, gang, rank))


def found_host(kv_host, scheduler):
    return asyncio.run(own_host(load({"engine": {"nodes": 2}, "scheduler": {"address": scheduler}}), kv_host))


@pytest.mark.parametrize(
    ("kv_host", "scheduler", "why"),
    [
        (LOOPBACK, "203.0.113.1:7400", r"^worker\.listen \(value .*: set worker\.listen to 0\.0\.0\.0:0"),
        ("203.0.113.2", "203.0.113.1:7400", r"^no network of this machine has the address 203\.0\.113\.2"),
    ],
)
def test_a_host_that_other_machines_cannot_reach(kv_host, scheduler, why):
    with pytest.raises(StartError, match=why):
        found_host(kv_host, scheduler)


def test_all_on_one_machine():
    assert found_host(LOOPBACK, "127.0.0.1:7400") == LOOPBACK


@pytest.mark.parametrize(
    "other", [{"scheduler": {"worker_lease_s": 9.0}}, {"worker": {"drain_timeout_s": 9.0}}]
)
def test_limits_of_time_must_be_equal(other):
    one, two = (_facts(WorkerIdentity(), load(tree), LOOPBACK) for tree in ({}, other))
    ((section, values),) = other.items()
    assert [key for key in one if one[key] != two[key]] == [f"{section}.{key}" for key in values]
