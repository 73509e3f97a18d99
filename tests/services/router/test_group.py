import contextlib
import multiprocessing

import pytest

from baton.addresses import listen
from baton.services.router.group import Group
from harness.support import CALL_S


def test_accepting_too_late_does_not_block():
    """Two processes may race to accept a connection; the slower one must not block its event loop."""
    with contextlib.closing(listen("127.0.0.1", 0)) as sock:
        sock.settimeout(5)  # so that a failing test ends
        group = Group([sock])
        with pytest.raises(BlockingIOError):
            group.sockets[0].accept()


def tell_port(group):
    group.tell_metrics_port(0, group.sockets[0].getsockname()[1])


def test_spawned_processes_share_sockets_and_memory():
    """Spawned processes, as after CUDA is initialized."""
    with contextlib.closing(listen("127.0.0.1", 0)) as sock:
        group = Group([sock])
        process = multiprocessing.get_context("spawn").Process(target=tell_port, args=(group,))
        process.start()
        process.join(CALL_S)
        assert process.exitcode == 0
        assert group.metrics_ports() == {0: sock.getsockname()[1]}
