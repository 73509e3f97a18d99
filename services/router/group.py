"""The processes of one router (router.processes), as each of them knows the others.

They are forked from one that listens for all: each has a socket of its own on the common port, so that the
kernel spreads connections over them, and holds those of the others too. So a connection outlives the process
whose socket it waits at: another one accepts it (http/server.py).
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

_ENDING = 0  # the first word; then the metrics' port of each process
_WORD = 8  # bytes: written and read as a whole


class Group:
    """The sockets and the memory that the processes share. To be made before they are started."""

    def __init__(self, sockets: Sequence[socket.socket], memory: int | None = None) -> None:
        """Share these sockets, one for each process, all on one port.

        memory: a descriptor of the memory that the other processes already share.
        """
        self.sockets = tuple(sockets)
        for sock in sockets:  # of two that look at one, the second must not wait for a connection
            sock.setblocking(False)
        size = _WORD * (1 + len(self.sockets))
        if memory is None:
            memory = os.memfd_create("baton-router")
            os.ftruncate(memory, size)
        self._memory = memory
        self._words = memoryview(mmap.mmap(memory, size)).cast("Q")

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a process that is a new program copies of the descriptors."""
        return _received, (self.sockets, reduction.DupFd(self._memory))

    def __len__(self) -> int:
        return len(self.sockets)

    @property
    def ending(self) -> bool:
        """Whether all processes end, not one of them alone."""
        return bool(self._words[_ENDING])

    def end(self) -> None:
        """Note that all processes end."""
        self._words[_ENDING] = 1

    def tell_metrics_port(self, number: int, port: int) -> None:
        """Tell the others where process `number` serves its own metrics."""
        self._words[1 + number] = port

    def metrics_ports(self) -> dict[int, int]:
        """Return where each process serves its own metrics, by number; those that once did."""
        return {number: port for number, port in enumerate(self._words[1:]) if port}


def _received(sockets: Sequence[socket.socket], memory: Any) -> Group:
    return Group(sockets, memory.detach())


@dataclass(frozen=True)
class Seat:
    """One process's place in its group. It stays the same when the process is started again."""

    group: Group
    number: int

    @property
    def sock(self) -> socket.socket:
        """The socket on which it listens."""
        return self.group.sockets[self.number]

    @property
    def others(self) -> list[socket.socket]:
        """The sockets of the other processes."""
        return [sock for sock in self.group.sockets if sock is not self.sock]

    def named(self, router_id: str) -> str:
        """Return a router's name for people."""
        return router_id if self.alone else f"{router_id}, {self.number + 1} of {len(self.group)} processes"

    @property
    def alone(self) -> bool:
        """Whether the router is this process."""
        return len(self.group) == 1
