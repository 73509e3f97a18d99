"""Addresses as host:port."""

import socket

import pytest

from baton import addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("scheduler:7400", "scheduler", 7400),
        ("10.0.0.5:0", "10.0.0.5", 0),
        ("10.0.0.5", "10.0.0.5", 0),
        (" worker-3 ", "worker-3", 0),
        ("[fd00::5]:7401", "fd00::5", 7401),
        ("[fd00::5]", "fd00::5", 0),
        ("fd00::5", "fd00::5", 0),
        ("::", "::", 0),
        (":::7401", "::", 7401),
    ],
)
def test_an_address_is_split(text, host, port):
    assert addresses.split(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", ":7401", "host:", "host:http", "host:70000", "host:-1", "[fd00::5", "a b:1"]
)
def test_invalid_addresses(text):
    with pytest.raises(ValueError, match=r"host:port"):
        addresses.split(text)


def test_an_address_is_joined():
    assert addresses.join("scheduler", 7400) == "scheduler:7400"
    assert addresses.join("fd00::5", 7400) == "[fd00::5]:7400"


def test_a_wildcard_is_dialled_as_loopback():
    assert all(map(addresses.is_wildcard, ("0.0.0.0", "::")))
    assert not any(map(addresses.is_wildcard, ("127.0.0.1", "::1", "host")))
    assert addresses.from_here("0.0.0.0:7400") == "127.0.0.1:7400"
    assert addresses.from_here("[::]:7400") == "[::1]:7400"
    assert addresses.from_here("10.0.0.5:7400") == "10.0.0.5:7400"


def test_the_ipv6_wildcard_listens_on_both_families():
    with addresses.listen("::", 0) as sock:
        port = sock.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port), 5) as client:
                accepted, peer = sock.accept()
                accepted.close()
                assert addresses.unmapped(peer[0]) == host == addresses.unmapped(client.getsockname()[0])
        with pytest.raises(OSError, match="in use"):
            addresses.listen("127.0.0.1", port)
    with addresses.listen("::1", 0) as sock, pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", sock.getsockname()[1]), 5)
