"""The interfaces of a placement policy, called in the scheduler's process some times per placement."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Flag, auto
from typing import ClassVar

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Limits
from baton.scheduler.types import Need, WorkerRecord


class Side(Flag):
    """What a worker would do for a request."""

    READ = auto()  # read the prompt
    WRITE = auto()  # write the answer
    BOTH = READ | WRITE


class Filter(ABC):
    """Keeps the workers that may take a request. Pure: changes nothing, raises nothing."""

    code: ClassVar[pb.Rejection.Code]  # of the rejection when no worker is kept
    reason: ClassVar[str]  # and its text, after "no worker can read the prompt: "; see `why`

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    @abstractmethod
    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        """`worker` may do `side` of `need`."""

    def why(self, workers: Sequence[WorkerRecord], need: Need, side: Side) -> str:
        """The text for a rejection of all of `workers`, at least one."""
        del workers, need, side
        return self.reason


class PairFilter(ABC):
    """Keeps the prefill workers that can hand over to a decode worker. Pure."""

    @abstractmethod
    def keeps(self, prefill: WorkerRecord, decode: WorkerRecord) -> bool:
        """KV can go from `prefill` to `decode`."""

    @abstractmethod
    def explain(self, prefill: WorkerRecord, decode: WorkerRecord) -> str:
        """Why not, in a few words that name both workers."""


class Scorer(ABC):
    """Says how good a worker is for a request. Pure.

    `Need.prefix_hashes` is there for scorers that know which worker holds which blocks.
    """

    side: ClassVar[Side]  # asked only for workers that would do this

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    @abstractmethod
    def score(self, worker: WorkerRecord, need: Need) -> float:
        """In [0, 1]; 1 is best."""


class Picker(ABC):
    """Picks one of the scored workers."""

    @abstractmethod
    def pick(self, scored: Sequence[tuple[WorkerRecord, float]], rng: random.Random) -> WorkerRecord:
        """One of `scored`, which is never empty. Draws from `rng` only."""
