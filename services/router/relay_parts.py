"""Declare what relays share (`RelayParts`, one per model) and what a leg sees of its relay (`Owner`).

Used by relay.py, the legs, encodes.py and prefix.py; served.py builds a `RelayParts`. It has no
behaviour of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from baton.scheduler.client import Placement
from baton.services.router.chronicle import Chronicle
from baton.services.router.load import RouterCounts
from baton.services.router.metrics import RouterMetrics
from baton.services.router.placement import Placements
from baton.services.router.pool import WorkerPool
from baton.services.router.recovery import MAX_ATTEMPTS
from baton.services.router.sink import OutputSink
from baton.services.router.state import Journal, RequestState
from baton.services.router.suspects import Convicts, Quarantine
from baton.services.router.waiting import WaitingRoom


@dataclass(frozen=True)
class RelayParts:
    placements: Placements
    pool: WorkerPool
    metrics: RouterMetrics
    waiting: WaitingRoom
    replace_wait_s: float  # limit from a failure until another placement makes progress
    journal: Journal
    chronicle: Chronicle
    convicts: Convicts
    max_attempts: int = MAX_ATTEMPTS
    encode_min_tokens: int = 256  # images with fewer tokens are computed with the prompt
    counts: RouterCounts = field(default_factory=RouterCounts)
    quarantine: Quarantine = field(default_factory=Quarantine)


class Owner(Protocol):
    """A relay, as its legs see it."""

    state: RequestState
    parts: RelayParts
    sink: OutputSink

    @property
    def placement(self) -> Placement: ...
    def grow(self) -> bool: ...
    def close(self) -> None: ...
