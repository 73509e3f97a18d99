"""The live page lets in, and lets act, whom it should."""

import pytest

from baton.services.router.ops.door import COOKIE, Door


@pytest.mark.parametrize("host", ["localhost", "localhost:8001", "127.0.0.1:8001", "[::1]:8001"])
def test_without_a_key_this_machines_names_open_it(host):
    assert Door("").opens([(b"host", host.encode())])


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8001", "10.0.0.5:8001", "127.0.0.1.evil.example", ""]
)
def test_without_a_key_other_names_do_not(host):
    """Otherwise another site's page could lead its own name to this machine, and read and drain."""
    assert not Door("").opens([(b"host", host.encode())])


def test_a_key_opens_it_from_anywhere():
    door = Door("right")
    assert door.opens([(b"host", b"page.example"), (b"authorization", b"Bearer right")])
    assert door.opens([(b"cookie", f"a=b; {COOKIE}={door.cookie()}".encode())])


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer wrong"),
        (b"authorization", b"Basic right"),
        (b"authorization", b"Bearer "),
        (b"cookie", f"{COOKIE}=right".encode()),
        (b"cookie", f"{COOKIE}={Door('right').cookie()}".encode()),  # of another process
        (b"host", b"localhost"),
    ],
)
def test_nothing_else_does(header):
    assert not Door("right").opens([header])


def test_the_cookie_does_not_show_the_key():
    assert "right" not in Door("right").cookie()


def test_actions_come_from_the_page_itself():
    assert Door("").may_act([(b"x-baton-ops", b"1")])
    assert not Door("").may_act([(b"host", b"localhost")])
