"""The goals and bounds of autoscaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.protos import scheduler_pb2 as pb

TARGET = 0.99  # share of requests that should meet each goal


@dataclass(frozen=True, slots=True)
class Bounds:
    """The minimum and maximum number of workers of a role."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Goals:
    """The goals of autoscaling. Times are in seconds."""

    mode: Literal["off", "advise", "roles", "on"]
    first_token_s: float  # time from a request's arrival to its first token
    gap_s: float  # mean gap between the tokens of an answer
    prefill: Bounds
    decode: Bounds
    interval_s: float  # between two decisions
    down_after_s: float  # remove a worker once fewer have sufficed for this long
    # change a worker's role once its side could spare it for this long, and not again within that time
    flip_after_s: float
    encode: Bounds = Bounds(0, 0)  # most 0: encode workers are not scaled

    def bounds(self, role: pb.Role) -> Bounds:
        return {pb.ROLE_PREFILL: self.prefill, pb.ROLE_DECODE: self.decode}.get(role, self.encode)
