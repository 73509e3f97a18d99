"""Placements of a simulated router: the scheduler, Baton's own, chooses and books.

A router's events reach it in batches, as often as a real router's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment
from baton.scheduler.need import Need
from baton.scheduler.policy import NoChoice
from baton.scheduler.reporter import FLUSH_S, RENEWALS_PER_LEASE
from baton.scheduler.types import RouterReport
from baton.services.simulate.deployment import SimulatedDeployment


@dataclass(frozen=True)
class Wire:
    """The time that messages take, in seconds; none by default."""

    message_s: float = 0.0  # between a router and a worker, one way
    place_s: float = 0.0  # a placement call of the scheduler, both ways


class SimulatedPlacements:
    """One simulated router's placements, and its reports of their ends."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deployment: SimulatedDeployment,
        lease_s: float,
        wire: Wire,
        freed: Callable[[], None],
    ) -> None:
        """Place by the scheduler of `deployment`. `freed` is called when bookings end."""
        self._loop = loop
        self._deployment = deployment
        self._wire = wire
        self._freed = freed
        self._held: dict[str, Attempt] = {}
        self._prefilled: list[Attempt] = []
        self._finished: list[tuple[Attempt, pb.Finished]] = []
        self._renew_s = lease_s / RENEWALS_PER_LEASE
        loop.call_later(self._renew_s, self._renew)

    async def place(self, need: Need) -> Assignment | NoChoice:
        """Return the workers of an attempt, which begins at once, or a rejection."""
        await _pause(self._wire.place_s / 2)
        found = self._deployment.placer.place(need)
        if isinstance(found, Assignment):
            self._held[need.attempt.request_id] = need.attempt
        start_s = self._wire.message_s if isinstance(found, Assignment) else 0.0
        await _pause(self._wire.place_s / 2 + start_s)
        return found

    def prefilled(self, attempt: Attempt) -> None:
        """Note that the prompt is prefilled."""
        self._prefilled.append(attempt)
        self._report_soon()

    def end(self, attempt: Attempt, outcome: str) -> None:
        """Note that the attempt is over. Ignores an attempt that was not placed."""
        held = self._held.pop(attempt.request_id, None)
        if held is not None:
            self._finished.append((held, pb.Finished(outcome=outcome)))
            self._report_soon()

    def _report_soon(self) -> None:
        if len(self._prefilled) + len(self._finished) == 1:
            self._loop.call_later(FLUSH_S, self._report)

    def _report(self) -> None:
        report = RouterReport(prefilled=tuple(self._prefilled), finished=tuple(self._finished))
        self._prefilled, self._finished = [], []
        self._deployment.report(report)
        self._freed()

    def _renew(self) -> None:
        if self._held:
            self._deployment.report(RouterReport(renewed=tuple(self._held.values())))
        self._loop.call_later(self._renew_s, self._renew)


async def _pause(seconds: float) -> None:
    """Wait; with 0 s return at once, without running other tasks."""
    if seconds > 0:
        await asyncio.sleep(seconds)
