import pytest

from baton.services.router.ops import access as module
from baton.services.router.ops.access import COOKIE, FREE_TRIES, PageAccess, Tries
from harness.scheduling import Clock

OURS = ("localhost", "localhost:8001", "127.0.0.1:8001", "[::1]:8001")
OTHERS = ("evil.example", "evil.example:8001", "10.0.0.5:8001", "127.0.0.1.evil.example", "")


@pytest.mark.parametrize("host", [*OURS, *OTHERS])
def test_without_a_key_only_this_machines_names_open_it(host):
    """Another site could point its own name to this machine, and then read the page and drain workers."""
    assert PageAccess("").opens([(b"host", host.encode())]) == (host in OURS)


def test_a_key_opens_it_from_anywhere():
    access = PageAccess("right")
    assert access.opens([(b"host", b"page.example"), (b"authorization", b"Bearer right")])
    assert access.opens([(b"cookie", f"a=b; {COOKIE}={access.cookie()}".encode())])
    assert "right" not in access.cookie()


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer wrong"),
        (b"authorization", b"Basic right"),
        (b"authorization", b"Bearer "),
        (b"cookie", f"{COOKIE}=right".encode()),
        (b"cookie", f"{COOKIE}={PageAccess('right').cookie()}".encode()),  # another process's cookie
        (b"host", b"localhost"),
    ],
)
def test_nothing_else_opens_it(header):
    assert not PageAccess("right").opens([header])


def test_actions_come_from_the_page_itself():
    assert PageAccess("").may_act([(b"x-baton-ops", b"1")])
    assert not PageAccess("").may_act([(b"host", b"localhost")])


def test_waits_grow_and_end():
    clock = Clock()
    tries = Tries(clock)
    waits = []
    for _ in range(FREE_TRIES + 12):
        clock.now += tries.wait_s("10.0.0.1")
        tries.failed("10.0.0.1")
        waits.append(tries.wait_s("10.0.0.1"))
    assert waits[:FREE_TRIES] == [0.0] * FREE_TRIES
    assert (waits[FREE_TRIES : FREE_TRIES + 3], waits[-1]) == ([1.0, 2.0, 4.0], 60.0)
    assert tries.wait_s("10.0.0.2") == 0.0
    tries.passed("10.0.0.1")
    assert tries.wait_s("10.0.0.1") == 0.0


def test_the_table_is_bounded_and_a_network_is_one_address(monkeypatch):
    monkeypatch.setattr(module, "MOST_ADDRESSES", 100)
    clock = Clock()
    tries = Tries(clock)
    for number in range(10_000):
        for _ in range(FREE_TRIES + 1):
            tries.failed(f"10.{number // 2500}.{number // 256 % 256}.{number % 256}")
    assert len(tries) <= 100
    assert tries.wait_s("192.0.2.1") > 0  # the table is full of waiting addresses, so no new one may try
    clock.now += 3600.0
    assert tries.wait_s("192.0.2.1") == 0.0
    for number in range(FREE_TRIES + 1):
        tries.failed(f"2001:db8::{number}")
    assert tries.wait_s("2001:db8::ffff") > 0  # the same /64 network
    assert tries.wait_s("2001:db8:1::1") == 0
