"""Operators' actions on the live page: drain, undrain, change a role. Each is logged and shown.

They need an operator's rights. With security.tls a router has none, and the page names the command to use.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
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
        steps: dict[str, Callable[[SchedulerClient, Action], Awaitable[str]]] = {
            "drain": self._drain,
            "undrain": self._undrain,
            "role": self._role,
        }
        try:
            done = await self._first(steps[action.action], action)
        except (SchedulerError, ConfigError, ActionRefused) as error:
            log.warning("%s asked to %s %s: refused: %s", caller, action.action, action.worker, error)
            self._events.add(WARNING, f"{action.action} {action.worker}: refused: {error}")
            raise ActionRefused(str(error)) from None
        log.warning("%s: %s", caller, done)
        self._events.add(INFO, f"{done} (asked by {caller})")
        return done

    async def _first(self, step: Callable[[SchedulerClient, Action], Awaitable[str]], action: Action) -> str:
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
                return await step(scheduler, action)
        return await step(last, action)

    async def _drain(self, scheduler: SchedulerClient, action: Action) -> str:
        reply = await scheduler.drain(action.worker)
        return _done(reply.worker_id, reply.problem, "is draining")

    async def _undrain(self, scheduler: SchedulerClient, action: Action) -> str:
        reply = await scheduler.undrain(action.worker)
        return _done(reply.name, reply.problem, "takes requests again")

    async def _role(self, scheduler: SchedulerClient, action: Action) -> str:
        reply = await scheduler.set_role(action.worker, roles.role(action.role).wire)
        return _done(reply.worker_id, reply.problem, f"is a {action.role} worker now")


def _done(worker: str, problem: str, done: str) -> str:
    if problem or not worker:
        raise ActionRefused(problem or "there is no worker of that name")
    return f"{worker} {done}"
