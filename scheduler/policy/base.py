"""The interfaces of a placement policy, called several times per placement in the scheduler's process."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Flag, auto
from typing import ClassVar

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.need import Need
from baton.scheduler.types import PlacementLimits, WorkerRecord


class Side(Flag):
    """Select the part of a request that a worker would take."""

    NONE = 0  # it only hands over KV of the prompt that it holds
    PREFILL = auto()
    DECODE = auto()
    BOTH = PREFILL | DECODE

    def __init__(self, value: int) -> None:
        self.prefills = bool(value & 1)  # `Side.PREFILL in side` takes four times as long
        self.decodes = bool(value & 2)


class PolicyPart:
    """A filter, a pair filter, a scorer or a picker. Made once per process, by its name in the settings."""

    def __init__(self, limits: PlacementLimits) -> None:
        """Keep `limits`, which bound how full workers may get."""
        self.limits = limits


class Filter(PolicyPart, ABC):
    """Keep the workers that may take a request. Pure: changes nothing, raises nothing."""

    code: ClassVar[pb.Rejection.Code]  # code of the rejection if no worker is kept
    reason: ClassVar[str]  # its text, after "no worker can prefill: "; see `why`

    @abstractmethod
    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        """Return whether `worker` may do `side` of `need`."""

    def why(self, workers: Sequence[WorkerRecord], need: Need, side: Side) -> str:
        """Return the text for a rejection of all of `workers`, at least one."""
        del workers, need, side
        return self.reason


class PairFilter(PolicyPart, ABC):
    """Keep the prefill workers that can hand over to a decode worker. Pure."""

    @abstractmethod
    def keeps(self, prefill: WorkerRecord, decode: WorkerRecord) -> bool:
        """Return whether KV can go from `prefill` to `decode`."""

    @abstractmethod
    def explain(self, prefill: WorkerRecord, decode: WorkerRecord) -> str:
        """Explain briefly why not, naming both workers."""


class Scorer(PolicyPart, ABC):
    """Say how good a worker is for a request. Pure.

    `Need.tokens_for` tells how much of the prompt a worker would have to compute.
    """

    side: ClassVar[Side]  # asked only for workers that would do this

    @abstractmethod
    def score(self, worker: WorkerRecord, need: Need) -> float:
        """Return a score in [0, 1]; 1 is best."""


class Picker(PolicyPart, ABC):
    """Pick one of the scored workers."""

    # The number of workers that it picks from, drawn at random from those the filters keep, in addition to
    # those that hold most of the prompt. 0: all, which costs a look at each of them per placement.
    draws: ClassVar[int] = 0

    @abstractmethod
    def pick(self, scored: Sequence[tuple[WorkerRecord, float]], rng: random.Random) -> WorkerRecord:
        """Return one of `scored`, which is never empty. Draw from `rng` only."""
