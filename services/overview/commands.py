"""Operators' questions to schedulers, and actions on a worker: drain, undrain and change of role."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerUnavailable
from baton.services import roles
from baton.services.errors import ServiceError

T = TypeVar("T")
Kind = Literal["drain", "undrain", "role"]


class ActionRefused(ServiceError):
    """The action was not carried out; the text says why."""


async def first_answer(scheduler: SchedulerClient, question: Callable[[SchedulerClient], Awaitable[T]]) -> T:
    """Ask the schedulers in turn until one answers. Raises SchedulerUnavailable if none does."""
    for _ in range(scheduler.schedulers - 1):
        with contextlib.suppress(SchedulerUnavailable):
            return await question(scheduler)  # the next call goes to another one
    return await question(scheduler)


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
