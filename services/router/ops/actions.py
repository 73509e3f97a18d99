"""Operators' actions on the live page: drain, undrain, change a role. Each is logged and shown.

They need an operator's rights. With security.tls a router has none, and the page names the command to use.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.services.errors import ServiceError
from baton.services.overview.commands import ActionRefused, Kind, act
from baton.services.overview.workers import INFO, WARNING
from baton.services.router.ops.feed import Events

log = logging.getLogger("baton.audit")


class Action(BaseModel):
    """An action that the page asks for."""

    model_config = ConfigDict(extra="forbid")

    action: Kind
    worker: str = Field(min_length=1, max_length=200)
    confirm: str  # repeats `worker`
    role: str = ""


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
        except (SchedulerError, ServiceError) as error:
            log.warning("%s asked to %s %s: refused: %s", caller, action.action, action.worker, error)
            self._events.add(WARNING, f"{action.action} {action.worker}: refused: {error}")
            raise ActionRefused(str(error)) from None
        log.warning("%s: %s", caller, done)
        self._events.add(INFO, f"{done} (asked by {caller})")
        return done

    async def _first(self, action: Action) -> str:
        """Call the scheduler that lists the worker; if none does, call each until one knows its name.

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
                return await act(scheduler, action.action, action.worker, action.role)
        return await act(last, action.action, action.worker, action.role)
