"""The cache of channels closes none that has a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from baton.handoff import channels as module
from baton.handoff.channels import Channels
from baton.handoff.config import MIB
from baton.handoff.memory.arena import Arena
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.protos import handoff_pb2 as pb
from harness.support import eventually

BOUND = 4


@pytest.fixture
def staging() -> Iterator[Staging]:
    with closing(Staging(Arena(MIB, 4096), 30.0)) as made:
        yield made


@pytest.fixture
def channels() -> Iterator[Channels]:
    with closing(Channels(BOUND)) as made:
        yield made


def meet(channels: Channels, count: int) -> None:
    """Get channels to this many other addresses, without connecting."""
    for port in range(1, count + 1):
        channels.stub(f"127.0.0.1:{port}")


def test_channels_that_no_call_can_use_are_closed(
    staging: Staging, channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = psutil.Process()
    with closing(HandoffService(staging, 0, "127.0.0.1:0", MIB)) as service:
        port = int(service.address.rpartition(":")[2])

        def connected() -> bool:
            return any(one.raddr and one.raddr[1] == port for one in me.net_connections("tcp"))

        channels.stub(service.address).Staged(pb.StagedRequest(), timeout=20)
        assert connected()
        meet(channels, BOUND)
        assert connected()
        monkeypatch.setattr(module, "_LONGEST_CALL_S", -1.0)
        meet(channels, BOUND)
        eventually(lambda: not connected(), 5, "the connection that nobody used is closed")
        assert len(channels._channels) == BOUND
