"""Placement policies to compare with Baton's, added by entry points as another package would.

`plugins/` is such a package as pip would install it; `install` puts it on the path.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from baton.scheduler.need import Need
from baton.scheduler.policy.base import Picker, Scorer, Side
from baton.scheduler.types import PlacementLimits, WorkerRecord
from baton.services.config import PolicySettings

PLUGINS = Path(__file__).with_name("plugins")


class RoundRobin(Picker):
    """Picks the workers of a role in turn."""

    def __init__(self, limits: PlacementLimits) -> None:
        super().__init__(limits)
        self._turns: dict[int, int] = {}

    def pick(self, scored: Sequence[tuple[WorkerRecord, float]], rng: random.Random) -> WorkerRecord:
        del rng
        role = scored[0][0].role
        turn = self._turns[role] = self._turns.get(role, -1) + 1
        return scored[turn % len(scored)][0]


class LongestPrefix(Scorer):
    """Prefers the worker that holds most of the prompt, regardless of its queue."""

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        return 1 - need.tokens_for(worker.worker_id) / need.prompt_tokens


_QUEUES = {"queued_prompt_tokens": 1.0, "running_requests": 1.0}
# Name -> the policy, and whether the scheduler knows the workers' caches.
POLICIES: dict[str, tuple[PolicySettings, bool]] = {
    "random": (PolicySettings(scorers={}), False),
    "round robin": (PolicySettings(scorers={}, picker="round_robin"), False),
    "least loaded": (PolicySettings(scorers=_QUEUES, picker="best"), False),
    "longest prefix": (
        PolicySettings(scorers={"longest_prefix": 1.0, "running_requests": 1.0}, picker="best"),
        True,
    ),
    "Baton without events": (PolicySettings(), False),
    "Baton": (PolicySettings(), True),
}


def install() -> None:
    """Make the policies available by name."""
    if str(PLUGINS) not in sys.path:
        sys.path.append(str(PLUGINS))
