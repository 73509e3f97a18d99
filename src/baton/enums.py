"""The names of roles and states as people and metrics see them."""

from __future__ import annotations

from baton.protos import scheduler_pb2 as pb


def role_name(role: pb.Role) -> str:
    """Return the name of a role; empty if the role is unspecified."""
    return pb.Role.Name(role).removeprefix("ROLE_").lower() if role else ""


def state_name(state: pb.WorkerState) -> str:
    return pb.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()
