"""The scheduler's side of a simulated deployment, which is the product's code, and the workers.

The store, the placer with its policy, the index of prefixes and its upkeep are those of a scheduler's
process; what reaches them by gRPC there is a call here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.knowledge import Knowledge
from baton.scheduler.placer import Placer
from baton.scheduler.policy import Policy
from baton.scheduler.prefix_metrics import PrefixMetrics
from baton.scheduler.prefixes.index import PrefixIndex
from baton.scheduler.prefixes.ledger import PrefixLedger
from baton.scheduler.store.memory import MemoryStore
from baton.scheduler.types import Reserved, RouterReport
from baton.services import roles
from baton.services.config import SchedulerSettings
from baton.services.simulate.engine import Machine, SimulatedEngine
from baton.services.simulate.figures import Gaps
from baton.services.simulate.loop import at_once
from baton.services.simulate.profile import Profile
from baton.services.simulate.worker import Fault, SimulatedWorker

LOOK_S = 0.5  # between two looks at the fleet, as in a scheduler's process


@dataclass(frozen=True)
class Split:
    """Numbers of workers by role."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    def __str__(self) -> str:
        pairs = f"{self.prefill}P{self.decode}D" if self.prefill or self.decode else ""
        return "+".join(part for part in (pairs, f"{self.mixed} mixed" if self.mixed else "") if part)

    @property
    def workers(self) -> int:
        """All of them."""
        return self.prefill + self.decode + self.mixed

    @property
    def flags(self) -> str:
        """The flags of `baton up`."""
        counts = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return " ".join(f"--{role} {number}" for role, number in counts.items() if number)

    def names(self) -> list[tuple[str, pb.Role]]:
        """Return the workers' names with their roles."""
        counts = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return [
            (f"{role}-{number}", roles.role(role).wire)
            for role, many in counts.items()
            for number in range(many)
        ]


@dataclass
class Desk:
    """One scheduler's notes of what its routers sent on its advice and no worker has taken yet."""

    routers: set[str] = field(default_factory=set)
    sent: dict[str, Reserved] = field(default_factory=dict)  # by worker


class SimulatedDeployment:
    """A scheduler and its workers, on the loop's time."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        split: Split,
        profile: Profile,
        settings: SchedulerSettings,
        *,
        block_tokens: int,
        seed: int,
        events: bool = True,
    ) -> None:
        """Prepare it. Without `events` the scheduler hears nothing of caches. Raises BadPolicy."""
        settings = settings.model_copy(update={"prefix_pull_s": 0.0})  # pulls from others are not simulated
        self._loop = loop
        self._profile = profile
        self._settings = settings
        self._block_tokens = block_tokens
        self._draw = random.Random(seed)  # noqa: S311 (no secret)
        self._split = split
        self._lives: dict[str, int] = {}
        self._numbers: dict[str, int] = {}  # by name, in the order of their first start
        self._retired: dict[str, float] = {}  # by name: seconds in steps of its lives that are over
        self._machine = Machine(profile.engine.cores)
        self.lost = 0
        self.desks: list[Desk] = []  # of schedulers that keep what they advised
        self.questions = 0  # asked of workers for their room
        self.roster = 0  # how often a worker came or went
        self.fullest = 0.0  # the highest share of a bound that any worker has reached
        self.workers: dict[str, SimulatedWorker] = {}  # by id: those that live
        self.store = MemoryStore("simulated", loop.time)
        self.ledger: PrefixLedger | None = None
        self._knowledge: Knowledge | None = None
        if events:
            index = PrefixIndex(settings.prefix_blocks)
            self.ledger = PrefixLedger(index, loop.time, heartbeat_s=settings.heartbeat_s)
            self._knowledge = Knowledge(self.ledger, PrefixMetrics(CollectorRegistry()), loop.time)
        policy = Policy(settings, settings.policy, random.Random(seed))  # noqa: S311
        self.placer = Placer(
            self.store,
            policy,
            settings,
            settings.placement_lease_s,
            lambda _: None,
            prefixes=self.ledger,
            clock=loop.time,
        )

    def begin(self, faults: Sequence[Fault]) -> None:
        """Start the workers, and have the faults happen."""
        for name, role in self._split.names():
            self._start(name, role)
        for fault in faults:
            self._loop.call_at(fault.at_s, self._strike, fault)

    async def watch(self) -> None:
        """Keep what is known of caches up to date, as a scheduler's process does."""
        while self._knowledge is not None:
            self._knowledge.look(await self.placer.view(self._loop.time()))
            await self._knowledge.tend()
            await asyncio.sleep(LOOK_S)

    def report(self, report: RouterReport) -> None:
        """Take a router's report."""
        at_once(self.store.report(report, self._settings.placement_lease_s))

    @property
    def gaps(self) -> Gaps:
        """The gaps between all tokens so far."""
        return self._machine.gaps

    def busy_s(self) -> dict[str, float]:
        """Return the seconds in steps, by name of the worker."""
        found = dict(self._retired)
        for worker in self.workers.values():
            found[worker.name] = found.get(worker.name, 0.0) + worker.engine.busy_s
        return found

    def _start(self, name: str, role: pb.Role) -> None:
        life = self._lives[name] = self._lives.get(name, 0) + 1
        number = self._numbers.setdefault(name, len(self._numbers))
        engine = SimulatedEngine(self._loop, self._profile, self._block_tokens, self._machine, number)
        worker = SimulatedWorker(
            name, life, role, profile=self._profile, block_tokens=self._block_tokens, engine=engine
        )
        worker.admits(self._settings, self._loop.time)
        self.workers[worker.worker_id] = worker
        self.roster += 1
        self._register(worker)
        self._loop.call_later(self._draw.random() * self._settings.heartbeat_s, self._beat, worker)

    def _register(self, worker: SimulatedWorker) -> None:
        lease_s = self._settings.worker_lease_s
        refusal = at_once(self.store.register(worker.identity, pb.WORKER_STATE_READY, lease_s))
        if refusal:
            raise RuntimeError(refusal)

    def _beat(self, worker: SimulatedWorker) -> None:
        if not worker.alive:
            return
        now = self._loop.time()
        self._loop.call_later(self._settings.heartbeat_s, self._beat, worker)
        if now < worker.silent_until:
            return
        state, lease_s = pb.WORKER_STATE_READY, self._settings.worker_lease_s
        heard = at_once(self.store.heartbeat(worker.worker_id, state, worker.beat(now), lease_s))
        if not heard.known:
            self._register(worker)
        if self.ledger is not None:
            worker.tell(now, self.ledger.hear)

    def _strike(self, fault: Fault) -> None:
        worker = next((one for one in self.workers.values() if one.name == fault.worker), None)
        if worker is None:
            return
        if fault.silent:
            worker.silent_until = self._loop.time() + fault.seconds
            return
        self.lost += 1
        worker.alive = False
        del self.workers[worker.worker_id]
        self.roster += 1
        self._retired[worker.name] = self._retired.get(worker.name, 0.0) + worker.engine.busy_s
        worker.engine.kill()
        self._loop.call_later(fault.seconds, self._start, worker.name, worker.identity.role)
