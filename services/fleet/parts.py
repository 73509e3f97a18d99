"""The processes of a deployment: started, restarted when they die, given up when they cannot live, ended.

A part that dies is started again, at once the first time, then later and later. One that dies too often is
given up: told in one line, and done without where the rest can serve.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from baton.services.errors import StartError
from baton.services.fleet import processes
from baton.services.fleet.processes import Child
from baton.services.fleet.watch import Seen

STOP_TIMEOUT_S = 15.0
WATCHER_STOP_S = 1.0  # it holds nothing

Say = Callable[[str, str], None]  # a part's name, what became of it


class Kind(Enum):
    """What a part is, in the order in which parts are ended."""

    WATCHER = "watcher"  # first: it would take the others' end for news
    ROUTER = "router"  # then no new work comes
    WORKER = "worker"  # one covers for another, of either side
    SCHEDULER = "scheduler"  # last: the others report to it


@dataclass(frozen=True)
class Patience:
    """How often a part may die, and how long it is left alone before it is started again."""

    restarts: int = 3  # within `window_s`: one that dies more often needs a person
    window_s: float = 600.0  # of what is longer ago nothing counts any more
    backoff_s: float = 1.0  # before the second restart; the first one does not wait
    growth: float = 4.0

    def before_restart_s(self, number: int) -> float:
        """Seconds before restart `number` of a window, the first being 1."""
        return 0.0 if number == 1 else self.backoff_s * self.growth ** (number - 2)

    @property
    def window(self) -> str:
        return f"{self.window_s / 60:g} min"


@dataclass
class Part:
    """One process that must run, and how to start it again."""

    name: str
    kind: Kind
    run: Callable[[], None]
    child: Child | None = None  # the last one
    ready: bool = False
    proven: bool = False  # it was ready once: if it dies it is worth another start
    given_up: bool = False
    restart_at: float | None = None  # time.monotonic, seconds; it is dead until then
    deaths: list[float] = field(default_factory=list)  # time.monotonic, within the window

    @property
    def runs(self) -> bool:
        """As far as anybody has looked: it may have died a moment ago."""
        return self.child is not None and self.restart_at is None and not self.given_up

    @property
    def known_as(self) -> str:
        """The name by which others know this life of it: a worker's has its process id."""
        number = self.child.process.pid if self.child else None
        return f"{self.name}.{number}" if self.kind is Kind.WORKER else self.name


@dataclass
class Parts:
    """All of a deployment. Methods return at once, but for `stop`."""

    log_dir: Path
    say: Say
    patience: Patience = field(default_factory=Patience)
    members: list[Part] = field(default_factory=list)

    def add(self, name: str, kind: Kind, run: Callable[[], None]) -> Part:
        """Start it, and keep it running from now on."""
        # Who would tell that the watcher is ready?
        part = Part(name, kind, run, ready=kind is Kind.WATCHER, proven=kind is Kind.WATCHER)
        self.members.append(part)
        self._start(part)
        return part

    def reap(self) -> None:
        """Start again what died after it was ready, when its time has come.

        Raises StartError when one died that never was ready, or when nothing can serve any more.
        """
        now = time.monotonic()
        for part in self.members:
            if part.restart_at is not None and part.restart_at <= now:
                part.restart_at = None
                self._start(part)
            elif part.child and part.runs and not part.child.alive:
                self._died(part, part.child, now)

    def note(self, seen: Seen) -> None:
        """Somebody saw a part ready."""
        for part in self.members:
            child = part.child
            if child is None or part.ready or part.known_as != seen.name or seen.at < child.started_at:
                continue
            part.ready = part.proven = True
            self.say(part.name, f"ready: {seen.detail}")

    @property
    def serve(self) -> bool:
        """Whether there may be streams that run."""
        return any(part.proven for part in self.members if part.kind is Kind.ROUTER)

    @property
    def waiting_for(self) -> list[str]:
        """Those that are not ready and may still be."""
        return [part.name for part in self.members if not part.ready and not part.given_up]

    @property
    def sentinels(self) -> list[int]:
        """What becomes readable when one of those that run dies."""
        return [part.child.process.sentinel for part in self.members if part.child and part.runs]

    @property
    def next_start_s(self) -> float | None:
        """Seconds until `reap` has one to start; None: only a death is news."""
        due = [part.restart_at for part in self.members if part.restart_at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def stop(self, drain_s: float) -> None:
        """End all; the router has `drain_s` more, for the streams that run."""
        for kind in Kind:
            group = [part.child for part in self.members if part.kind is kind and part.child]
            timeout_s = WATCHER_STOP_S if kind is Kind.WATCHER else STOP_TIMEOUT_S
            timeout_s += drain_s if kind is Kind.ROUTER else 0.0
            for child in processes.stop_all(group, timeout_s):
                self.say(child.name, f"did not end within {timeout_s:.0f} s: killed")

    def _start(self, part: Part) -> None:
        part.child = processes.spawn(part.name, part.run, self.log_dir)

    def _died(self, part: Part, child: Child, now: float) -> None:
        if not part.proven:
            raise StartError(f"{part.name} could not start: {child.last_error()} (log: {child.log})")
        if child.left and part.ready and part.kind is Kind.WORKER:
            part.ready = False  # it was drained: the next one waits until it is undrained
            self.say(part.name, "ended as it was told; started again")
            self._start(part)
            return
        part.ready = part.kind is Kind.WATCHER
        part.deaths = [at for at in part.deaths if at > now - self.patience.window_s] + [now]
        number, most = len(part.deaths), self.patience.restarts
        if number > most:
            part.given_up = True
            self._do_without(part, child)
            return
        pause_s = self.patience.before_restart_s(number)
        part.restart_at = now + pause_s
        again = f"restarting in {pause_s:g} s" if pause_s else "restarting"
        self.say(
            part.name,
            f"died ({child.how_it_ended()}); {again}, {number} of {most} within {self.patience.window}",
        )

    def _do_without(self, part: Part, child: Child) -> None:
        """Say what that means; raises StartError where it means the end."""
        died = f"died {len(part.deaths)} times within {self.patience.window}"
        last = f"{child.last_error()} (log: {child.log})"
        if problem := self._cannot_serve():
            raise StartError(f"{part.name} {died}, and {problem}: {last}")
        left = "what becomes ready is told no more" if part.kind is Kind.WATCHER else "the rest serves on"
        self.say(part.name, f"{died} ({child.how_it_ended()}): given up, {left}: {last}")

    def _cannot_serve(self) -> str:
        """Why, without what is given up; empty where the rest can."""
        if all(part.given_up for part in self.members if part.kind is Kind.WORKER):
            return "no worker is left"
        gone = {part.kind for part in self.members if part.given_up}
        if gone & {Kind.ROUTER, Kind.SCHEDULER}:
            return "nothing can serve without it"
        if Kind.WATCHER in gone and not all(part.proven for part in self.members):
            return "nobody can tell how far the others are"
        return ""
