"""The interfaces of a placement policy's parts. They are called several times per placement."""

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
    """The part of a request that a worker would run."""

    NONE = 0  # only hand over KV
    PREFILL = auto()
    DECODE = auto()
    BOTH = PREFILL | DECODE

    def __init__(self, value: int) -> None:
        self.prefills = bool(value & 1)  # `Side.PREFILL in side` takes four times as long
        self.decodes = bool(value & 2)


class PolicyPart:
    """A filter, pair filter, scorer or picker. Created once per process, by its name in the settings."""

    def __init__(self, limits: PlacementLimits) -> None:
        self.limits = limits


class Filter(PolicyPart, ABC):
    """Keep the workers that may take a request. Has no side effects and does not raise."""

    code: ClassVar[pb.Rejection.Code]  # code of the rejection if no worker passes
    reason: ClassVar[str]  # its text, after "no worker can prefill: "; see `why`

    @abstractmethod
    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        """Return whether `worker` may run `side` of `need`."""

    def why(self, workers: Sequence[WorkerRecord], need: Need, side: Side) -> str:
        """Return the text for a rejection of all `workers`, which are never empty."""
        del workers, need, side
        return self.reason


class PairFilter(PolicyPart, ABC):
    """Keep the prefill workers that can hand over to a decode worker. Has no side effects."""

    @abstractmethod
    def keeps(self, prefill: WorkerRecord, decode: WorkerRecord) -> bool:
        """Return whether KV can go from `prefill` to `decode`."""

    @abstractmethod
    def explain(self, prefill: WorkerRecord, decode: WorkerRecord) -> str:
        """Explain briefly why KV cannot go from one to the other, naming both workers."""


class Scorer(PolicyPart, ABC):
    """Rate a worker for a request. Has no side effects.

    `Need.tokens_for` returns how much of the prompt the worker would have to compute.
    """

    side: ClassVar[Side]  # used only for workers that would run this side

    @abstractmethod
    def score(self, worker: WorkerRecord, need: Need) -> float:
        """Return a score in [0, 1]; 1 is best."""


class Picker(PolicyPart, ABC):
    """Pick one of the scored workers."""

    # How many workers to pick from, drawn at random from those that pass the filters, in addition to those
    # that hold most of the prompt. 0: all, so each placement filters and scores every worker.
    draws: ClassVar[int] = 0

    @abstractmethod
    def pick(self, scored: Sequence[tuple[WorkerRecord, float]], rng: random.Random) -> WorkerRecord:
        """Return one of `scored`, which is never empty. Take random numbers only from `rng`."""
