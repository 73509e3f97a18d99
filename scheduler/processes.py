"""The routers that this scheduler hears from, and the log levels that operators set.

Neither is in the store. A restarted scheduler hears from its routers within a second, and a process keeps its
log level until it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.levels import LEVELS
from baton.protos import scheduler_pb2 as pb

SCHEDULER = "scheduler"
HEARD_S = 10.0  # a router counts as dead after this silence; it should ask once a second
_MOST_ROUTERS = 1024
_MOST_LEVELS = 4096


@dataclass
class _Heard:
    at: float  # time.monotonic
    load: pb.RouterLoad


class Processes:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._routers: dict[str, _Heard] = {}
        self._levels: dict[str, str] = {}

    def hear(self, router_id: str, load: pb.RouterLoad) -> None:
        now = self._clock()
        self._routers = {name: heard for name, heard in self._routers.items() if now - heard.at < HEARD_S} | {
            router_id: _Heard(now, load)
        }
        while len(self._routers) > _MOST_ROUTERS:
            del self._routers[next(iter(self._routers))]

    def routers(self) -> list[pb.RouterStatus]:
        """Return the routers heard recently."""
        now = self._clock()
        return [
            pb.RouterStatus(router_id=name, heard_age_s=now - heard.at, load=heard.load)
            for name, heard in sorted(self._routers.items())
            if now - heard.at < HEARD_S
        ]

    def level(self, process: str) -> str:
        """Return the log level set for a process, or an empty string."""
        return self._levels.get(process, "")

    def ask_level(self, process: str, level: str, workers: Iterable[str]) -> pb.SetLogLevelReply:
        """Set the level of the processes that match. The reply names them, or the problem."""
        if level not in LEVELS:
            return pb.SetLogLevelReply(problem=f"{level!r} is no log level: use {', '.join(LEVELS)}")
        workers, routers = sorted(workers), [one.router_id for one in self.routers()]
        groups = {"workers": workers, "routers": routers, "all": [SCHEDULER, *routers, *workers]}
        everybody = groups["all"]
        meant = groups.get(process) or [one for one in everybody if process and one.startswith(process)]
        if process in everybody:
            meant = [process]
        if not meant:
            return pb.SetLogLevelReply(
                problem=f"{process!r} is no process here; there are: {', '.join(everybody)}"
            )
        for one in meant:
            self._levels.pop(one, None)
            self._levels[one] = level
        while len(self._levels) > _MOST_LEVELS:
            del self._levels[next(iter(self._levels))]
        return pb.SetLogLevelReply(processes=meant)
