import socket
import time

from baton.services.fleet import ports
from harness.support import free_port


def test_a_free_port_is_not_waited_for():
    began = time.monotonic()
    ports.await_free("127.0.0.1", free_port())
    ports.await_free("127.0.0.1", 0)
    ports.await_free("192.0.2.1", 80)  # not an address of this machine
    assert time.monotonic() - began < 5


def test_a_port_is_waited_for_so_long():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        ports.await_free("127.0.0.1", holder.getsockname()[1], 0.2)
