"""The address at which a rank's Handoff service listens, and the one by which it is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from baton import rpc
from baton.addresses import split
from baton.handoff.channels import HandoffClient
from baton.handoff.config import MIB
from baton.handoff.errors import HandoffError
from baton.handoff.memory.arena import Arena
from baton.handoff.reports import Staged
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from harness.support import free_port


@pytest.fixture
def staging() -> Iterator[Staging]:
    with closing(Staging(Arena(MIB, 4096), 30.0)) as made:
        yield made
    rpc.act_as(None)


@pytest.mark.parametrize(
    ("listen", "advertise", "found", "local"),
    [
        ("127.0.0.1", "", "127.0.0.1", "127.0.0.1"),
        ("[::1]", "", "::1", "::1"),
        ("0.0.0.0", "kv.example", "kv.example", "127.0.0.1"),
        ("[::]", "fd00::5", "fd00::5", "::1"),
    ],
)
def test_it_is_found_where_it_was_said_and_here(
    staging: Staging, listen: str, advertise: str, found: str, local: str
) -> None:
    rpc.act_as(None, insecure=True)
    port = free_port()
    with (
        closing(HandoffService(staging, 0, f"{listen}:{port}", MIB, advertise)) as service,
        closing(HandoffClient()) as client,
    ):
        assert split(service.address) == (found, port)
        assert split(service.local_address) == (local, port)
        capacity = staging.capacity * 4096
        assert client.staged([service.local_address]) == Staged(0, 0, capacity)
        assert 0.9 * MIB < capacity < MIB


def test_a_taken_port_is_an_error_that_names_its_key(staging: Staging) -> None:
    with closing(HandoffService(staging, 0, "127.0.0.1:0", MIB)) as service:
        with pytest.raises(HandoffError, match=r"handoff\.port") as error:
            HandoffService(staging, 1, service.address, MIB)
        assert service.address in str(error.value)
