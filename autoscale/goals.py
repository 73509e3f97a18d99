"""The goals of autoscaling, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.protos import scheduler_pb2 as pb

TARGET = 0.99  # share of the requests within each goal that the numbers of workers are chosen for


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the most workers of a role."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Goals:
    """The aims of autoscaling. Times are seconds."""

    mode: Literal["off", "advise", "on"]
    first_token_s: float  # from a request's arrival to its first token
    gap_s: float  # mean gap between the tokens of an answer
    prefill: Bounds
    decode: Bounds
    interval_s: float  # between two decisions
    down_after_s: float  # a worker is taken away when so long fewer would have done
    flip_after_s: float  # a role changes when so long its side could spare it, and no sooner again

    def bounds(self, role: pb.Role) -> Bounds:
        """Return the bounds of the prefill or the decode side."""
        return self.prefill if role == pb.ROLE_PREFILL else self.decode
