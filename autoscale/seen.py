"""The input of one decision: the state of a deployment at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.protos import scheduler_pb2 as pb

Plan = Mapping[str, Mapping[str, pb.Role]]  # fleet -> place -> role of the worker to start there


@dataclass(frozen=True, slots=True)
class Member:
    """One live prefill, decode or encode worker."""

    worker_id: str
    name: str  # its place's name if a fleet started it
    role: pb.Role
    ready: bool  # it takes requests
    leaving: bool  # draining, or drained by an operator: no longer counted
    flips: bool  # it can take the other role
    load: pb.WorkerLoad
    queued_tokens: int  # prompt tokens placed on it and not prefilled yet
    requests: int  # placed on it and not finished
    slots: int  # batch size, or fewer if the KV cache holds fewer
    step_tokens: int = 0  # most tokens in a step
    batch: int = 0  # most requests in a step
    blocks: int = 0  # KV blocks that it has
    used: int = 0  # blocks in use
    booked: int = 0  # blocks booked there


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a deployment at one moment."""

    at: float  # seconds on a monotonic clock
    members: Sequence[Member]
    routers: Mapping[str, pb.RouterLoad] = field(default_factory=dict)  # keyed by router
    places: Mapping[str, Sequence[pb.Place]] = field(default_factory=dict)  # keyed by fleet
    plan: Plan = field(default_factory=dict)  # the plan in force

    def of(self, role: pb.Role) -> list[Member]:
        return [one for one in self.members if one.role == role and one.ready]
