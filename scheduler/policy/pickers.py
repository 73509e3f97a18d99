"""The built-in pickers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from baton.scheduler.policy.base import Picker
from baton.scheduler.types import WorkerRecord


class Best(Picker):
    """Pick the best of all workers, breaking ties at random. Suits one scheduler with few workers."""

    def pick(self, scored: Sequence[tuple[WorkerRecord, float]], rng: random.Random) -> WorkerRecord:
        top = max(score for _, score in scored)
        return rng.choice([worker for worker, score in scored if score == top])


class PowerOfTwo(Best):
    """Pick the best of two random workers and those that hold most of the prompt.

    Schedulers that do not know each other's last choices yet would otherwise all pick the same worker
    (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
    """

    draws: ClassVar[int] = 2


class PowerOfFour(PowerOfTwo):
    """Pick the best of four random workers and those that hold most of the prompt.

    Uncached prompts find a shorter queue than with two, at the cost of scoring two more workers (decision
    41).
    """

    draws: ClassVar[int] = 4
