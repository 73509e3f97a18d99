"""The sockets that a router's processes share."""

from __future__ import annotations

import contextlib

import pytest

from baton.addresses import listen
from baton.services.router.group import Group


def test_who_looks_at_another_s_socket_too_late_does_not_wait_there() -> None:
    """Two processes may see the same connection; the second one to accept it must not stop its event loop."""
    with contextlib.closing(listen("127.0.0.1", 0)) as sock:
        sock.settimeout(5)  # not for ever, where the socket is left as it was
        group = Group([sock])
        with pytest.raises(BlockingIOError):
            group.sockets[0].accept()
