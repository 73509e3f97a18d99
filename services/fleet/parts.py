"""Start, restart, give up and stop the processes of a deployment.

A part that dies is restarted, at once the first time, then after growing pauses. A part that dies too often
is given up; the others continue if they can serve without it. The workers of a gang end together: that counts
once, and they are given up together. If the machine cannot start another process, as at a process limit, the
start is retried for as long as it takes, because that is not the part's fault.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import Connection, wait
from pathlib import Path

from baton.services.errors import StartError
from baton.services.fleet import processes
from baton.services.fleet.budget import Budget, Patience
from baton.services.fleet.endings import OutOfMemory
from baton.services.fleet.log_files import Rotation
from baton.services.fleet.processes import Child
from baton.services.fleet.watch import Seen
from baton.services.printing import catch_up

STOP_TIMEOUT_S = 15.0
WATCHER_STOP_S = 1.0  # the watcher has nothing to finish
LAST_WORDS = 200  # characters quoted of a log's last line
FIRST_STARTS = 5  # tries to start a part that was never ready: a user is waiting for it
MOST_PAUSE_S = 30.0  # longest pause between tries to start a part
GANG_END_S = 15.0  # time for a gang's other workers to end after one has; they need less than a second
NOTICE_S = 1.0  # longest wait: a signal that comes just before a wait does not interrupt it
OWN_LOGS = ("supervisor", "node")  # logs of this process itself, if Ray or another program's `LLM` started it

NEW_PROGRAMS = (
    "CUDA is initialised in this process, as where NVML cannot count the GPUs (MIG), and would not survive a "
    "fork: each part is started as a new program, which takes longer"
)

Say = Callable[[str, str], None]  # a part's name, an event
Source = socket.socket | Connection | int


class Kind(Enum):
    """The kinds of parts, in the order in which they are stopped."""

    WATCHER = "watcher"  # first: it would report the end of the others
    ROUTER = "router"  # no new requests arrive after this
    WORKER = "worker"  # any role: workers can replace each other
    SCHEDULER = "scheduler"  # last: the others report to it


@dataclass
class Part:
    """One process that must run, and its restarts."""

    name: str
    kind: Kind
    run: Callable[[], None]
    child: Child | None = None  # the latest one
    ready: bool = False
    proven: bool = False  # it was ready once, so it is worth a restart
    given_up: bool = False
    ordered: bool = False  # the scheduler ordered it: the deployment survives its failure to start
    restart_at: float | None = None  # time.monotonic, seconds; dead until then
    failed_starts: int = 0  # consecutive starts that failed for lack of a process
    gang: str = ""  # the gang of a worker
    budget: Budget = field(default_factory=Budget)  # one for all workers of a gang
    ends_by: float | None = None  # time.monotonic; its gang is over, and it is killed at this time
    leaves_by: float | None = None  # time.monotonic; it was told to end, and is killed at this time

    @property
    def runs(self) -> bool:
        """Whether the process was running at the last check; it may have died since."""
        return self.child is not None and self.restart_at is None and not self.given_up

    @property
    def state(self) -> str:
        if self.leaves_by is not None:
            return "leaving"
        if self.given_up:
            return "given up"
        return "running" if self.runs else "restarting"

    @property
    def known_as(self) -> str:
        """The name by which the scheduler knows its process: a worker's includes its process id."""
        number = self.child.process.pid if self.child else None
        return f"{self.name}.{number}" if self.kind is Kind.WORKER else self.name


@dataclass
class Parts:
    """The parts of a deployment that this machine runs. No method but `stop` blocks."""

    log_dir: Path | None  # None: parts inherit this process's output
    say: Say
    patience: Patience = field(default_factory=Patience)
    # Whether these are all parts of the deployment. If so, a part that cannot start ends the deployment, and
    # so does a lack of parts. If not, each part is given up on its own, and the owner watches its readiness.
    whole: bool = True
    members: list[Part] = field(default_factory=list)
    rotation: Rotation = field(default_factory=Rotation)
    memory: OutOfMemory = field(default_factory=OutOfMemory)
    forks: bool = True  # False once forking has failed

    def add(
        self, name: str, kind: Kind, run: Callable[[], None], *, ordered: bool = False, gang: str = ""
    ) -> Part:
        # The readiness of the watcher, and of a part of a larger deployment, is not reported here.
        unwatched = kind is Kind.WATCHER or not self.whole
        part = Part(name, kind, run, ready=unwatched, proven=unwatched, ordered=ordered, gang=gang)
        for sibling in self._siblings(part):
            part.budget = sibling.budget
        self.members.append(part)
        self._start(part)
        return part

    @property
    def last_words(self) -> str:
        """The last log line of the first part that is not ready yet, worded as the end of a sentence."""
        for part in self.members:
            if part.name in self.waiting_for and part.child is not None:
                return f"; {part.name} said last ({part.child.log}): {part.child.last_error()[:LAST_WORDS]}"
        return ""

    def retire(self, part: Part, within_s: float) -> None:
        """Tell a part to end for good; `reap` removes it, and kills it after `within_s` seconds."""
        part.leaves_by = time.monotonic()
        if part.child and part.child.alive:
            part.leaves_by += within_s
            part.child.process.terminate()

    def reap(self) -> None:
        """Handle dead parts, and restart those whose pause has passed.

        Raises StartError if a part died before it was ever ready, or if the remaining ones cannot serve.
        """
        self._bound_logs()
        now = time.monotonic()
        # A worker whose engine failed comes last: the death of another member of its gang may be the cause.
        for part in sorted(self.members, key=lambda one: bool(one.child and one.child.engine_failed)):
            if part.leaves_by is not None:
                self._let_go(part, part.leaves_by <= now)
            elif part.restart_at is not None and part.restart_at <= now:
                part.restart_at = None
                self._start(part)
            elif part.child and part.runs and not part.child.alive:
                self._died(part, part.child, now)
            elif part.child and part.ends_by is not None and part.ends_by <= now:
                self.say(part.name, "did not end with its gang: killed")
                part.child.process.kill()
                part.ends_by = None

    def note(self, seen: Seen) -> None:
        """Mark a part as ready, unless it died or was restarted since it was seen."""
        for part in self.members:
            child = part.child
            if child is None or not part.runs or part.ready:
                continue
            if part.known_as != seen.name or seen.at < child.started_at:
                continue
            part.ready = part.proven = True
            self.say(part.name, f"ready: {seen.detail}")

    @property
    def serve(self) -> bool:
        """Whether a router was ever ready, so that streams may be running."""
        return any(part.proven for part in self.members if part.kind is Kind.ROUTER)

    @property
    def waiting_for(self) -> list[str]:
        """Names of the parts that are not ready yet, not given up and not leaving."""
        return [
            part.name
            for part in self.members
            if not part.ready and not part.given_up and part.leaves_by is None
        ]

    @property
    def sentinels(self) -> list[int]:
        """Descriptors that become readable when a running part dies."""
        return [part.child.process.sentinel for part in self.members if part.child and part.runs]

    @property
    def next_start_s(self) -> float | None:
        """Return the seconds until `reap` has work even if no part dies; None for never."""
        times = ((part.restart_at, part.leaves_by, part.ends_by) for part in self.members)
        due = [at for each in times for at in each if at is not None]
        left = [max(0.0, min(due) - time.monotonic())] if due else []
        return min([*left, *([self.rotation.due_s] if self.log_dir else [])], default=None)

    def wait(self, sources: Iterable[Source], at_most_s: float | None = None) -> list[object]:
        """Wait until a source is readable, a part dies or `reap` has work; return what is readable.

        Returns after NOTICE_S at the latest.
        """
        due = (at_most_s, self.next_start_s, catch_up())
        limits = [seconds for seconds in due if seconds is not None]
        return list(wait([*sources, *self.sentinels], timeout=min([NOTICE_S, *limits])))

    def stop(
        self,
        drain_s: float,
        worker_s: float = 0.0,
        ended: Callable[[Child], None] = lambda _: None,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """Stop all parts, kind by kind; the router gets `drain_s` extra seconds for running streams.

        Workers get `worker_s` extra seconds, if routers elsewhere use them.

        Calls `told` once SIGTERM has been sent to the routers, and `ended` for each part that ended without
        being killed, as soon as it has exited.
        """
        for kind in Kind:
            group = [part.child for part in self.members if part.kind is kind and part.child]
            timeout_s = WATCHER_STOP_S if kind is Kind.WATCHER else STOP_TIMEOUT_S
            timeout_s += {Kind.ROUTER: drain_s, Kind.WORKER: worker_s}.get(kind, 0.0)
            report = told if kind is Kind.ROUTER else lambda: None
            for child in processes.stop_all(group, timeout_s, ended, report):
                self.say(child.name, f"did not exit within {timeout_s:.0f} s: killed")

    def _let_go(self, part: Part, late: bool) -> None:
        """Remove a retired part that has ended; kill it if it is `late`."""
        if part.child and part.child.alive and late:
            self.say(part.name, "did not end in time: killed")
            part.child.process.kill()
            part.child.process.join(processes.KILLED_S)
        if part.child is None or not part.child.alive:
            self.members.remove(part)
            self.say(part.name, "ended")

    def _bound_logs(self) -> None:
        if self.log_dir is None:
            return
        names = [*OWN_LOGS, *(part.name for part in self.members)]
        rotated = self.rotation.look(self.log_dir / f"{name}.log" for name in names)
        for part in self.members:
            if part.child and part.child.log in rotated:
                part.child.log_from = 0

    def _start(self, part: Part) -> None:
        try:
            part.child = processes.spawn(part.name, part.run, self.log_dir)
        except OSError as error:
            self._not_started(part, error)
            return
        part.failed_starts = 0
        if self.forks and not part.child.forked:
            self.forks = False
            self.say(part.name, NEW_PROGRAMS)
        if part.child.log_problem:
            self.say(part.name, f"runs without a log: {part.child.log_problem}")

    def _not_started(self, part: Part, error: OSError) -> None:
        """Try again later. Raises StartError after FIRST_STARTS tries if the part was never ready."""
        part.failed_starts += 1
        why = f"this machine cannot start another process: {error.strerror or error}"
        if part.failed_starts >= FIRST_STARTS and not part.proven and not part.ordered:
            raise StartError(
                f"{part.name} could not start: {why} (limits: `ulimit -u -n`, the cgroup's pids.max)"
            )
        pause_s = self.patience.before_restart_s(min(part.failed_starts, 20) + 1)
        pause_s = min(pause_s, MOST_PAUSE_S)
        part.restart_at = time.monotonic() + pause_s
        self.say(part.name, f"not started: {why}; retrying in {pause_s:g} s")

    def _died(self, part: Part, child: Child, now: float) -> None:
        why = self.memory.words()
        # A member whose engine never served ended because of another member, maybe on another machine.
        sibling_lost = bool(part.gang) and child.engine_failed
        if not part.proven and not part.ordered and not sibling_lost:
            raise StartError(f"{part.name} could not start: {child.last_words(why)}")
        if child.left and (part.ready or not self.whole) and part.kind is Kind.WORKER:
            part.ready = False  # it was drained: its successor waits until it is undrained
            self.say(part.name, "exited after a drain; restarted")
            self._start(part)
            return
        gang_had_met = child.engine_failed or (self.whole and part.ready)
        part.ready, part.ends_by = part.kind is Kind.WATCHER, None
        budget = part.budget
        if child.started_at < budget.ended_at:
            part.restart_at = max(now, budget.restart_at)
            self.say(part.name, f"ended with its gang; {_again(part.restart_at - now)}")
        elif child.engine_failed and part.kind is Kind.WORKER and (part.proven or sibling_lost):
            pause_s = budget.engine_failed(now, self.patience)
            part.restart_at = now + pause_s
            what = f"its engine failed: {child.last_error()[:LAST_WORDS]}"
            self.say(part.name, f"{what}; {_again(pause_s)}")
        elif (restart_s := budget.died(now, self.patience)) is not None:
            part.restart_at = now + restart_s
            number, most = len(budget.deaths), self.patience.restarts
            what = f"died ({child.how_it_ended()}{why and f': {why}'}); {_again(restart_s)}"
            self.say(part.name, f"{what}, {number} of {most} within {self.patience.window}")
        else:
            self._give_up(part)
            self._do_without(part, child, why)
            return
        if gang_had_met:
            self._await_siblings(part, now)

    def _await_siblings(self, part: Part, now: float) -> None:
        """Let the rest of a gang end in time: its next life would wait for a member that hangs."""
        for one in self._siblings(part):
            if one.child and one.runs and one.child.started_at < part.budget.ended_at and not one.ends_by:
                one.ends_by = now + GANG_END_S

    def _siblings(self, part: Part) -> list[Part]:
        return [one for one in self.members if one is not part and part.gang and one.gang == part.gang]

    def _give_up(self, part: Part) -> None:
        """Stop restarting a part and the rest of its gang, which would wait for it."""
        for one in (part, *self._siblings(part)):
            one.given_up, one.ready, one.restart_at, one.ends_by = True, False, None, None
            if one.child and one.child.alive:
                one.child.process.terminate()

    def _do_without(self, part: Part, child: Child, why: str) -> None:
        """Report that a part was given up. Raises StartError if the other parts cannot serve without it."""
        died = f"died {len(part.budget.deaths)} times within {self.patience.window}"
        last = child.last_words(why)
        if problem := self._cannot_serve():
            raise StartError(f"{part.name} {died}, and {problem}: {last}")
        left = f" with the rest of gang {part.gang}" if part.gang else ""
        if self.whole:  # the owner of a larger deployment knows what is left
            watches = part.kind is Kind.WATCHER
            left += ", readiness is no longer reported" if watches else ", the others keep serving"
        self.say(part.name, f"{died} ({child.how_it_ended()}): given up{left}: {last}")

    def _cannot_serve(self) -> str:
        """Return why the remaining parts cannot serve, or ""."""
        if not self.whole:
            return ""
        if all(part.given_up for part in self.members if part.kind is Kind.WORKER):
            return "no worker is left"
        # There may be several schedulers.
        for kind in (Kind.ROUTER, Kind.SCHEDULER):
            own = [part.given_up for part in self.members if part.kind is kind]
            if own and all(own):
                return "nothing can serve without it"
        watchers = [part for part in self.members if part.kind is Kind.WATCHER]
        if any(part.given_up for part in watchers) and not all(part.proven for part in self.members):
            return "nothing can tell when the others are ready"
        return ""


def _again(pause_s: float) -> str:
    return f"restarting in {pause_s:g} s" if pause_s > 0 else "restarting"
