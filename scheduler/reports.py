"""A router's bookings and the events of its attempts, told to every scheduler.

Each scheduler keeps all bookings in its own memory. The one that placed an attempt has booked it; the others
hear of it here, and all of them hear what becomes of it. Each has a `Reporter` of its own, so one that is
away holds up no other. With S schedulers S reports are sent in place of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.exchange import Exchange, Send
from baton.scheduler.reporter import Event, Reporter
from baton.scheduler.types import Known, Reserved, attempt_to_wire, known_to_wire, shares


class Reports:
    """The reports of one router's client. Not shared between event loops."""

    def __init__(self, sends: Mapping[str, Send], home: Callable[[], str]) -> None:
        """Send by each of `sends`, by the scheduler's address.

        `home` returns the address of the one that this router would ask for a placement now.
        """
        self._held: dict[str, Known] = {}  # by request id; renewed while they are here
        self.reserved: dict[str, Reserved] = {}  # what they hold, by worker id; no empty ones
        self._lease_s = 0.0
        self._home = home
        self._reporters = {
            address: Reporter(self._held, partial(self._is_home, address), partial(self._released, address))
            for address in sends
        }
        self.exchanges = {  # by address: with whom this router places, and to whom it reports
            address: Exchange(send, self._reporters[address], self._give_back)
            for address, send in sends.items()
        }
        self.on_released: Callable[[], None] = lambda: None  # the scheduler knows that reservations ended

    @property
    def held(self) -> int:
        """The number of attempts being renewed."""
        return len(self._held)

    @property
    def dropped(self) -> int:
        """The number of events that no scheduler was told."""
        return min(one.dropped for one in self._reporters.values())

    def hold(self, known: Known, lease_s: float, *, booked_by: str = "") -> None:
        """Renew a live attempt from now on, and no longer an earlier one at the same request.

        What it holds is reported to all schedulers but the one at the address `booked_by`, which placed it.
        """
        first = not self._held
        self._put(known.attempt.request_id, known)
        self._lease_s = lease_s
        for reporter in self._reporters.values():
            reporter.renew(lease_s, first=first)
        if len(self._reporters) > 1 or not booked_by:
            self._add(known_to_wire(known), but=booked_by)

    def hold_on(self, attempt: Attempt, epoch: int) -> Attempt:
        """Hold under `epoch` what an attempt holds, and report it. Return the attempt of that epoch.

        A later epoch that was refused, or got no reply, may have ended the attempt for a scheduler.
        """
        held = Attempt(attempt.request_id, epoch)
        known = self._held.get(attempt.request_id)
        if known and known.attempt == attempt:
            self.hold(replace(known, booking=replace(known.booking, attempt=held)), self._lease_s)
        return held

    def prefilled(self, attempt: Attempt) -> None:
        """Report that the prompt is prefilled."""
        known = self._held.get(attempt.request_id)
        if known and known.attempt == attempt:
            self._put(attempt.request_id, replace(known, prefilled=True))
        self._add(attempt_to_wire(attempt))

    def shared(self, attempt: Attempt, blocks: int) -> None:
        """Report that other requests hold so many KV blocks of the decode worker as well."""
        known = self._held.get(attempt.request_id)
        if known and known.attempt == attempt:
            booking = replace(known.booking, blocks=max(0, known.booking.blocks - blocks))
            self._put(attempt.request_id, replace(known, booking=booking))
            self._add(pb.Shared(attempt=attempt_to_wire(attempt), blocks=booking.blocks))

    def finished(self, attempt: Attempt, outcome: str, cost: pb.Cost | None = None) -> None:
        """Report that the attempt is over: stop, length, abort, error, or retried. Twice does no harm."""
        self._drop(attempt)
        if not self._reporters[self._home()].answered:
            self.on_released()  # for placements that are made without it
        self._add(pb.Finished(attempt=attempt_to_wire(attempt), outcome=outcome, cost=cost))

    def saw_generation(self, generation: str, scheduler: str) -> None:
        """Note the generation that answers at an address; a new one is told again all that is held."""
        self._reporters[scheduler].saw_generation(generation)

    async def close(self) -> None:
        """Send what is queued, within `CLOSE_S`, and stop renewing."""
        for request_id in [*self._held]:
            self._put(request_id, None)
        await asyncio.gather(*(one.close() for one in self.exchanges.values()))

    def _add(self, event: Event, but: str = "") -> None:
        for address, reporter in self._reporters.items():
            if address != but:
                reporter.add(event)

    def _give_back(self, placed: pb.Placement) -> None:
        """Report the end of a placement that nobody waits for any more."""
        self.finished(Attempt(placed.request_id, placed.epoch), "abort")

    def _released(self, address: str) -> None:
        """Pass on that a scheduler knows of ends, or has stopped answering, where placements depend on it."""
        if self._is_home(address) or not self._reporters[address].answered:
            self.on_released()

    def _is_home(self, address: str) -> bool:
        return len(self._reporters) == 1 or address == self._home()

    def _drop(self, attempt: Attempt) -> bool:
        """Renew it no longer; return False when it is not held, or another attempt at the request is."""
        known = self._held.get(attempt.request_id)
        if known is None or known.attempt != attempt:
            return False
        self._put(attempt.request_id, None)
        return True

    def _put(self, request_id: str, known: Known | None) -> None:
        """Hold this of a request from now on, or nothing any more, and keep the sums."""
        if before := self._held.get(request_id):
            for worker_id, share in shares(before):
                self.reserved[worker_id].take(share)
                if self.reserved[worker_id].empty:
                    del self.reserved[worker_id]
        if known is None:
            del self._held[request_id]
            return
        self._held[request_id] = known
        for worker_id, share in shares(known):
            self.reserved.setdefault(worker_id, Reserved()).add(share)
