"""Share sockets and a little memory between the processes of one router (router.processes).

Each process inherits the sockets of all processes. So when one ends, another accepts the connections that are
still waiting at its socket (http/server.py).
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Sequence
from dataclasses import dataclass

BACKLOG = 2048  # connections that may wait at each socket
_ENDING = 0  # index of the flag; each following word is a process's metrics port


class Group:
    """The shared sockets and memory. Create it before the processes start."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        """sockets: one per process, on the same port."""
        self.sockets = tuple(sockets)
        for sock in sockets:  # two processes may race to accept; the slower one must not block
            sock.setblocking(False)
        self._words = multiprocessing.RawArray("Q", 1 + len(sockets))  # access to a word is atomic

    def __len__(self) -> int:
        return len(self.sockets)

    @property
    def ending(self) -> bool:
        """Whether all processes are ending, not only this one."""
        return bool(self._words[_ENDING])

    def end(self) -> None:
        self._words[_ENDING] = 1

    def tell_metrics_port(self, number: int, port: int) -> None:
        """Publish the port at which process `number` serves its own metrics."""
        self._words[1 + number] = port

    def metrics_ports(self) -> dict[int, int]:
        """Return each process's metrics port by its number, including processes that have ended."""
        return {number: port for number, port in enumerate(self._words[1:]) if port}


@dataclass(frozen=True)
class Seat:
    """One process's place in its group. A restarted process takes the same seat."""

    group: Group
    number: int

    @property
    def sock(self) -> socket.socket:
        return self.group.sockets[self.number]

    @property
    def others(self) -> list[socket.socket]:
        return [sock for sock in self.group.sockets if sock is not self.sock]

    def named(self, router_id: str) -> str:
        return router_id if self.alone else f"{router_id}, {self.number + 1} of {len(self.group)} processes"

    @property
    def alone(self) -> bool:
        """Whether the router has only this process. There may be other routers."""
        return len(self.group) == 1
