import socket
import time

from baton.services.fleet import ports
from harness.support import free_port


def test_a_port_is_waited_for_so_long():
    began = time.monotonic()
    for host, port in (("127.0.0.1", free_port()), ("127.0.0.1", 0), ("192.0.2.1", 80)):  # not an own address
        ports.await_free(host, port)
    assert time.monotonic() - began < 5
    with socket.create_server(("127.0.0.1", 0)) as holder:
        ports.await_free("127.0.0.1", holder.getsockname()[1], 0.2)
