"""Let the processes of one router (router.processes) know each other.

They are forked from one that listens for all: each has its own socket on the common port, so that the kernel
spreads connections over them, and also holds the others' sockets. So a connection outlives the process at
whose socket it waits: another one accepts it (http/server.py).
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

_ENDING = 0  # index of the first word; the next ones are the metrics port of each process
_WORD = 8  # bytes: written and read as a whole


class Group:
    """The sockets and the memory that the processes share. Make it before they are started."""

    def __init__(self, sockets: Sequence[socket.socket], memory: int | None = None) -> None:
        """Share these sockets, one per process, all on one port.

        memory: a descriptor of the memory that the other processes already share.
        """
        self.sockets = tuple(sockets)
        for sock in sockets:  # if two processes look at one, the second must not wait for a connection
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
        """Whether all processes are ending, not just one of them."""
        return bool(self._words[_ENDING])

    def end(self) -> None:
        self._words[_ENDING] = 1

    def tell_metrics_port(self, number: int, port: int) -> None:
        """Tell the others where process `number` serves its own metrics."""
        self._words[1 + number] = port

    def metrics_ports(self) -> dict[int, int]:
        """Return the metrics port of each process by number, including those that have ended."""
        return {number: port for number, port in enumerate(self._words[1:]) if port}


def _received(sockets: Sequence[socket.socket], memory: Any) -> Group:
    return Group(sockets, memory.detach())


@dataclass(frozen=True)
class Seat:
    """One process's place in its group. It keeps it across restarts."""

    group: Group
    number: int

    @property
    def sock(self) -> socket.socket:
        return self.group.sockets[self.number]

    @property
    def others(self) -> list[socket.socket]:
        return [sock for sock in self.group.sockets if sock is not self.sock]

    def named(self, router_id: str) -> str:
        """Return a router's display name."""
        return router_id if self.alone else f"{router_id}, {self.number + 1} of {len(self.group)} processes"

    @property
    def alone(self) -> bool:
        """Whether the router is this process."""
        return len(self.group) == 1
