"""Processes that share sockets and memory. A spawned one imports this file, so it imports little."""

import contextlib
import multiprocessing

from baton.addresses import listen
from baton.services.router.group import Group
from harness.support import CALL_S


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
