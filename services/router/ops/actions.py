"""Operators' actions on the live page: drain, undrain, change a role. Each is logged and shown.

They need an operator's rights. With security.tls a router has none, and the page names the command to use.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.services import roles
from baton.services.errors import ConfigError
from baton.services.router.ops.events import INFO, WARNING, Events

log = logging.getLogger("baton.audit")


class Action(BaseModel):
    """An action that the page asks for."""

    model_config = ConfigDict(extra="forbid")

    action: Literal["drain", "undrain", "role"]
    worker: str = Field(min_length=1, max_length=200)
    confirm: str  # repeats `worker`
    role: str = ""


class ActionRefused(Exception):
    """The action was not carried out; the message says why."""


class Actions:
    """Carries out actions through the scheduler that has the worker."""

    def __init__(self, schedulers: Sequence[SchedulerClient], events: Events, forbidden: str = "") -> None:
        """Act on `schedulers`, one per model. `forbidden` says why this router may not; "" if it may."""
        self._schedulers = schedulers
        self._events = events
        self.forbidden = forbidden

    async def run(self, action: Action, caller: str) -> str:
        """Carry out an action and return a description of it. Raises ActionRefused."""
        if self.forbidden:
            raise ActionRefused(self.forbidden)
        if action.confirm != action.worker:
            raise ActionRefused(
                f"not confirmed: the action is for {action.worker!r}, the confirmation for {action.confirm!r}"
            )
        try:
            done = await self._first(action)
        except (SchedulerError, ConfigError, ActionRefused) as error:
            log.warning("%s asked to %s %s: refused: %s", caller, action.action, action.worker, error)
            self._events.add(WARNING, f"{action.action} {action.worker}: refused: {error}")
            raise ActionRefused(str(error)) from None
        log.warning("%s: %s", caller, done)
        self._events.add(INFO, f"{done} (asked by {caller})")
        return done

    async def _first(self, action: Action) -> str:
        """Call the scheduler that has the worker; if none has it now, each until one knows its name.

        Raises the error of the last call.
        """
        has = [
            one
            for one in self._schedulers
            if any(worker.identity.worker_id == action.worker for worker in one.standby.workers)
        ]
        *others, last = has or self._schedulers
        for scheduler in others:
            with contextlib.suppress(SchedulerError, ActionRefused):
                return await _carry_out(scheduler, action)
        return await _carry_out(last, action)


async def _carry_out(scheduler: SchedulerClient, action: Action) -> str:
    match action.action:
        case "drain":
            drained = await scheduler.drain(action.worker)
            worker, problem, done = drained.worker_id, drained.problem, "is draining"
        case "undrain":
            undrained = await scheduler.undrain(action.worker)
            worker, problem, done = undrained.name, undrained.problem, "takes requests again"
        case "role":
            changed = await scheduler.set_role(action.worker, roles.role(action.role).wire)
            worker, problem, done = changed.worker_id, changed.problem, f"is a {action.role} worker now"
    if problem or not worker:
        raise ActionRefused(problem or "there is no worker of that name")
    return f"{worker} {done}"
