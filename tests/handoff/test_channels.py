"""The cache of channels never closes a channel with a running call."""

from contextlib import closing

import psutil
import pytest

from baton.handoff.channels import HandoffClient
from baton.handoff.config import MIB
from baton.handoff.memory.arena import Arena
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.protos import handoff_pb2 as pb
from harness.support import eventually

BOUND = 4


@pytest.fixture
def staging():
    with closing(Staging(Arena(MIB, 4096), 30.0)) as made:
        yield made


def meet(channels, first):
    """Use channels to BOUND other addresses, without connecting."""
    for port in range(first, first + BOUND):
        channels.end(channels.begin(f"127.0.0.1:{port}"))


def test_the_bound_closes_channels_without_calls(staging):
    me = psutil.Process()
    with (
        closing(HandoffService(staging, 0, "127.0.0.1:0", MIB)) as service,
        closing(HandoffClient(BOUND)) as client,
    ):
        port = int(service.address.rpartition(":")[2])

        def connected():
            return any(one.raddr and one.raddr[1] == port for one in me.net_connections("tcp"))

        client.call("Staged", service.address, pb.StagedRequest(), 20).result()
        kept = client.channels.begin(service.address)
        meet(client.channels, 1)
        assert connected()
        client.channels.end(kept)
        meet(client.channels, 11)
        eventually(lambda: not connected(), 5, "the unused connection is closed")
        assert len(client.channels) == BOUND
