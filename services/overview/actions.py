"""Operators' actions on a worker, from `baton drain`, `undrain` and `role`, `baton top` and the live page."""

from __future__ import annotations

from typing import Literal

from baton.scheduler.client import SchedulerClient
from baton.services import roles
from baton.services.errors import ServiceError

Kind = Literal["drain", "undrain", "role"]


class ActionRefused(ServiceError):
    """The action was not carried out; the text says why."""


async def act(scheduler: SchedulerClient, kind: Kind, worker: str, role: str = "") -> str:
    """Act on the worker with this name, id, or unique prefix of an id; return what it does now.

    Raises ActionRefused, SchedulerError, and ConfigError for an unknown `role`.
    """
    match kind:
        case "drain":
            drained = await scheduler.drain(worker)
            name, problem, done = drained.worker_id, drained.problem, "is draining"
        case "undrain":
            undrained = await scheduler.undrain(worker)
            name, problem, done = undrained.name, undrained.problem, "takes requests again"
        case "role":
            changed = await scheduler.set_role(worker, roles.role(role).wire)
            name, problem, done = changed.worker_id, changed.problem, f"is a {role} worker now"
    if problem or not name:
        raise ActionRefused(problem or "there is no worker of that name")
    return f"{name} {done}"
