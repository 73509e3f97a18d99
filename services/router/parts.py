"""Bundle the objects that all relays of a model share."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.services.router.chronicle import Chronicle
from baton.services.router.convicts import Convicts
from baton.services.router.journal import Journal
from baton.services.router.load import RouterCounts
from baton.services.router.metrics import RouterMetrics
from baton.services.router.pairs import Pairs
from baton.services.router.placement import Placements
from baton.services.router.pool import WorkerPool
from baton.services.router.quarantine import Quarantine
from baton.services.router.recovery import MAX_ATTEMPTS
from baton.services.router.waiting import WaitingRoom


@dataclass(frozen=True)
class RelayParts:
    """The objects that all relays of a model share."""

    placements: Placements
    pool: WorkerPool
    metrics: RouterMetrics
    waiting: WaitingRoom
    replace_wait_s: float = 60.0  # limit from a failure until another placement makes progress
    journal: Journal = field(default_factory=Journal)
    counts: RouterCounts = field(default_factory=RouterCounts)
    pairs: Pairs = field(default_factory=Pairs)
    chronicle: Chronicle = field(default_factory=Chronicle)
    max_attempts: int = MAX_ATTEMPTS
    quarantine: Quarantine = field(default_factory=Quarantine)
    convicts: Convicts = field(default_factory=Convicts)
