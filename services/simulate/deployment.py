"""A simulated deployment: Baton's own scheduler, called without gRPC, and simulated workers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass, field

from prometheus_client import CollectorRegistry

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.knowledge import Knowledge
from baton.scheduler.ledger import Ledger
from baton.scheduler.metrics import PrefixMetrics
from baton.scheduler.placer import Placer
from baton.scheduler.policy import Policy
from baton.scheduler.prefixes.index import PrefixIndex
from baton.scheduler.prefixes.prefix_ledger import PrefixLedger
from baton.scheduler.roster import Roster
from baton.services import roles
from baton.services.config import RouterSettings, SchedulerSettings
from baton.services.simulate.engine import Machine, SimulatedEngine
from baton.services.simulate.figures import Gaps, Goals
from baton.services.simulate.profile import Profile
from baton.services.simulate.worker import SimulatedWorker

LOOK_S = 0.5  # as in the scheduler's process


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
        return self.prefill + self.decode + self.mixed

    @property
    def flags(self) -> str:
        """The flags of `baton up`."""
        return " ".join(f"--{role} {number}" for role, number in asdict(self).items() if number)

    def names(self) -> list[tuple[str, pb.Role]]:
        return [
            (f"{role}-{number}", roles.role(role).wire)
            for role, many in asdict(self).items()
            for number in range(many)
        ]


@dataclass(frozen=True)
class Setup:
    """The settings of a simulation, without its trace."""

    split: Split
    profile: Profile = field(default_factory=Profile)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    goals: Goals = Goals(0.5, 0.05)  # noqa: RUF009 (frozen)
    events: bool = True  # workers report their caches to the scheduler
    routers: int = 1
    # Share of the run during which caches fill; requests that arrive then are not counted.
    warm_share: float = 0.2
    seed: int = 0


class _Settings(SchedulerSettings):
    @property
    def prefix_pull_s(self) -> float:
        return 0.0  # pulls of prefixes are not simulated


class SimulatedDeployment:
    """A scheduler and its workers, on the loop's virtual time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, setup: Setup, block_tokens: int) -> None:
        """Set up the scheduler. Raises BadPolicy."""
        profile = setup.profile
        settings = _Settings(**setup.scheduler.model_dump())
        self._loop = loop
        self._profile = profile
        self._settings = settings
        self._block_tokens = block_tokens
        self._draw = random.Random(setup.seed)  # noqa: S311 (no secret)
        self._split = setup.split
        self._machine = Machine(profile.engine.cores)
        self.workers: dict[str, SimulatedWorker] = {}  # id -> worker
        self.ledger = Ledger(settings.placement_lease_s, loop.time)
        self.roster = Roster("simulated", settings.worker_lease_s, self.ledger, loop.time)
        self._prefixes: PrefixLedger | None = None
        self._knowledge: Knowledge | None = None
        if setup.events:
            index = PrefixIndex()
            self._prefixes = PrefixLedger(index, loop.time, heartbeat_s=settings.heartbeat_s)
            self._knowledge = Knowledge(self._prefixes, PrefixMetrics(CollectorRegistry()), loop.time)
        policy = Policy(settings, settings.policy, random.Random(setup.seed))  # noqa: S311
        self.placer = Placer(self.roster, self.ledger, policy, prefixes=self._prefixes, clock=loop.time)

    def begin(self) -> None:
        """Start the workers."""
        for number, (name, role) in enumerate(self._split.names()):
            engine = SimulatedEngine(self._loop, self._profile, self._block_tokens, self._machine, number)
            worker = SimulatedWorker(name, role, self._profile, self._block_tokens, engine)
            self.workers[name] = worker
            if refusal := self.roster.register(worker.identity, pb.WORKER_STATE_READY):
                raise RuntimeError(refusal)
            self._loop.call_later(self._draw.random() * self._settings.heartbeat_s, self._beat, worker)

    async def watch(self) -> None:
        """Keep the prefix index up to date."""
        while self._knowledge is not None:
            self._knowledge.look(self.roster.view())
            await self._knowledge.tend()
            await asyncio.sleep(LOOK_S)

    @property
    def gaps(self) -> Gaps:
        return self._machine.gaps

    def busy_s(self) -> dict[str, float]:
        """Return how many seconds each worker spent in steps, by name."""
        return {name: worker.engine.busy_s for name, worker in self.workers.items()}

    def _beat(self, worker: SimulatedWorker) -> None:
        self._loop.call_later(self._settings.heartbeat_s, self._beat, worker)
        self.roster.heartbeat(worker.worker_id, pb.WORKER_STATE_READY, worker.load())
        if self._prefixes is not None:
            worker.tell(self._loop.time(), self._prefixes.hear)
