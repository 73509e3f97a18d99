"""The built-in pickers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from baton.scheduler.policy.base import Picker
from baton.scheduler.types import WorkerRecord


class Best(Picker):
    """Pick the best of all, breaking ties at random: right when one scheduler serves few workers."""

    def pick(self, scored: Sequence[tuple[WorkerRecord, float]], rng: random.Random) -> WorkerRecord:
        top = max(score for _, score in scored)
        return rng.choice([worker for worker, score in scored if score == top])


class PowerOfTwo(Best):
    """Pick the best of two drawn at random and of those that hold most of the prompt.

    Several schedulers that have not heard of each other's last choices do not all run to the same best worker
    (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
    """

    draws: ClassVar[int] = 2


class PowerOfFour(PowerOfTwo):
    """Pick the best of four drawn at random and of those that hold most of the prompt.

    Prompts that nobody holds find a shorter queue, at the cost of looking at two more workers (decision 41).
    """

    draws: ClassVar[int] = 4
