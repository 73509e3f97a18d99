"""All that one decision is made from, as it was seen at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.protos import scheduler_pb2 as pb

Plan = Mapping[str, Mapping[str, pb.Role]]  # fleet -> place -> role with which a worker starts there


@dataclass(frozen=True, slots=True)
class Member:
    """One prefill or decode worker that is alive."""

    worker_id: str
    name: str  # that of its place, where a fleet started it
    role: pb.Role
    ready: bool  # it takes requests
    leaving: bool  # it drains, or an operator drained it: no part of the numbers any more
    flips: bool  # it can take the other role
    load: pb.WorkerLoad
    queued_tokens: int  # prompt tokens placed on it and not prefilled yet
    requests: int  # placed on it and not over
    slots: int  # requests in its batch, or as many as its KV cache holds


@dataclass(frozen=True, slots=True)
class Seen:
    """One moment of a deployment."""

    at: float  # seconds, of a clock that never goes back
    members: Sequence[Member]
    routers: Mapping[str, pb.RouterLoad] = field(default_factory=dict)  # by router
    places: Mapping[str, Sequence[pb.Place]] = field(default_factory=dict)  # by fleet
    plan: Plan = field(default_factory=dict)  # in force

    def of(self, role: pb.Role) -> list[Member]:
        """Return the workers of a role that take requests."""
        return [one for one in self.members if one.role == role and one.ready]
