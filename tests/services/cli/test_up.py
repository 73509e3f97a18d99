import socket

import pytest

from baton.addresses import split
from baton.services.cli.up import beside_router
from baton.services.config import load
from baton.services.models import models_of
from harness.support import free_ports


def beside(port, scheduler):
    settings = load({"router": {"port": port}, "scheduler": scheduler})
    host, found = split(beside_router(settings, models_of(settings)))
    assert host == "127.0.0.1"
    return found


def test_the_page_is_beside_the_router():
    port = free_ports()
    assert beside(port, {"address": "127.0.0.1:7400"}) == port + 1


@pytest.mark.parametrize("key", ["address", "metrics_port"])
def test_it_leaves_the_scheduler_its_ports(key):
    """They count as taken even before anything listens there."""
    port = free_ports()
    own = {"address": f"127.0.0.1:{port + 1}"} if key == "address" else {"metrics_port": port + 1}
    assert beside(port, own) not in (0, port, port + 1)


def test_it_takes_a_free_port_if_that_one_is_taken():
    port = free_ports()
    with socket.create_server(("127.0.0.1", port + 1)):
        assert beside(port, {"address": "127.0.0.1:7400"}) not in (0, port, port + 1)
