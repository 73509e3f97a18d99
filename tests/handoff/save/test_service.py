"""A rank's Handoff service: addresses, ports, and the limit of early pulls."""

import socket
from contextlib import ExitStack, closing

import numpy as np
import pytest

from baton import rpc
from baton.addresses import join, split
from baton.handoff.channels import HandoffClient
from baton.handoff.config import MIB
from baton.handoff.errors import HandoffError
from baton.handoff.frames import FAIL, PULL, RECORDS, Frame
from baton.handoff.memory.arena import Arena
from baton.handoff.reports import Staged
from baton.handoff.save.service import GROWING, HandoffService
from baton.handoff.save.staging import Staging
from baton.protos import handoff_pb2 as pb
from harness.support import eventually, free_ports
from tests.handoff.server import connect


@pytest.fixture
def staging():
    with closing(Staging(Arena(MIB, 4096), 30.0)) as made:
        yield made
    rpc.act_as(None)


@pytest.fixture
def client():
    with closing(HandoffClient()) as made:
        yield made


@pytest.mark.parametrize(
    ("listen", "advertise", "found", "local"),
    [
        ("127.0.0.1", "", "127.0.0.1", "127.0.0.1"),
        ("[::1]", "", "::1", "::1"),
        ("0.0.0.0", "kv.example", "kv.example", "127.0.0.1"),
        ("[::]", "fd00::5", "fd00::5", "::1"),
    ],
)
def test_its_addresses(staging, client, listen, advertise, found, local):
    rpc.act_as(None, insecure=True)
    port = free_ports()
    with closing(HandoffService(staging, 0, f"{listen}:{port}", MIB, advertise)) as service:
        assert split(service.address) == (found, port)
        assert split(service.local_address) == (local, port)
        capacity = staging.capacity * 4096
        assert client.staged([service.local_address]) == Staged(0, 0, capacity)
        assert 0.9 * MIB < capacity < MIB


@pytest.mark.parametrize("listen", ["0.0.0.0", "[::]"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_wildcard_takes_calls_and_pulls_of_both_families(staging, client, listen, host):
    rpc.act_as(None, insecure=True)
    port = free_ports()
    with closing(HandoffService(staging, 0, f"{listen}:{port}", MIB, "kv.example")):
        assert client.staged([join(host, port)])
        with socket.create_connection((host, port + 1), timeout=5):
            pass


def test_a_taken_port_is_an_error_that_names_its_key(staging):
    with closing(HandoffService(staging, 0, "127.0.0.1:0", MIB)) as service:
        with pytest.raises(HandoffError, match=r"handoff\.listen") as error:
            HandoffService(staging, 1, service.address, MIB)
        assert service.address in str(error.value)


def test_a_taken_port_for_records_is_an_error_that_names_both(staging):
    port = free_ports() + 1
    wanted = rf"127\.0\.0\.1:{port}: .*with a free port before another free one"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(HandoffError, match=wanted):
        HandoffService(staging, 0, f"127.0.0.1:{port - 1}", MIB)
    with closing(HandoffService(staging, 0, f"127.0.0.1:{port - 1}", MIB)) as service:
        assert service.door_port == port  # the failed service has released it


def test_early_pulls_are_bounded(staging, client):
    entry = staging.reserve("r", 1, 4)
    fill = staging.filling(entry, 0, 1)
    fill.add(np.zeros(1, np.uint64))
    fill.close()
    staging.publish(entry, growing=True)
    request = pb.PullRequest(request_id="r", epoch=1, num_blocks=4, ticket=staging.tickets.of("r", 1))
    asked = Frame(PULL, request.SerializeToString())
    with closing(HandoffService(staging, 0, "127.0.0.1:0", MIB)) as service, ExitStack() as stack:
        for _ in range(GROWING):
            line, greeting = connect(service.address)
            stack.enter_context(closing(line))
            line.send(asked, before=greeting)
            assert line.receive().kind == RECORDS
        one_more, greeting = connect(service.address)
        stack.enter_context(closing(one_more))
        one_more.send(asked, before=greeting)
        refused = one_more.receive()
        assert (refused.kind, refused.head.split(b"\n")[0]) == (FAIL, b"SourceBusy")
        assert client.staged([service.local_address]).handoffs == 1
        line.close()  # one gives up
        eventually(lambda: _is_let_in(one_more, asked), 10, "its place is another's")


def _is_let_in(line, asked):
    line.send(asked)
    return line.receive().kind == RECORDS
