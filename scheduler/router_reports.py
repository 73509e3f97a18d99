"""Report a router's bookings, and the events of its attempts, to every scheduler.

Each scheduler keeps all bookings in its own memory. The one that placed an attempt has booked it already.
Each scheduler has its own `Exchange`, so an unreachable one does not delay the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.exchange import Event, Exchange, Send
from baton.scheduler.types import Booking, Reserved, attempt_to_wire, booking_to_wire


class Reports:
    """The bookings of one router, and their reports. Belongs to one event loop."""

    def __init__(self, sends: Mapping[str, Send], home: Callable[[], str]) -> None:
        """Send with `sends`, keyed by address. `home` returns the address for placements now."""
        self._held: dict[str, Booking] = {}  # keyed by request id
        self.reserved: dict[str, Reserved] = {}  # worker id -> bookings of `_held`; no empty entries
        self._lease_s = 0.0
        self._home = home
        self.exchanges = {  # keyed by address
            address: Exchange(
                send,
                self._held,
                partial(self._is_home, address),
                partial(self._released, address),
                self._give_back,
            )
            for address, send in sends.items()
        }
        self.on_released: Callable[[], None] = lambda: None  # called when a scheduler knows of freed room

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def dropped(self) -> int:
        """The number of events that reached no scheduler."""
        return min(one.dropped for one in self.exchanges.values())

    def hold(self, booking: Booking, lease_s: float, *, booked_by: str = "") -> None:
        """Keep an attempt's booking alive, replacing that of an earlier attempt at the same request.

        Reports it to all schedulers but the one at the address `booked_by`, which placed it.
        """
        first = not self._held
        self._put(booking.attempt.request_id, booking)
        self._lease_s = lease_s
        for exchange in self.exchanges.values():
            exchange.renew(lease_s, first=first)
        if len(self.exchanges) > 1 or not booked_by:
            self._add(booking_to_wire(booking), but=booked_by)

    def hold_on(self, attempt: Attempt, epoch: int) -> Attempt:
        """Move an attempt's booking to `epoch`, report it, and return the attempt of that epoch.

        Needed after a placement with a later epoch failed: a scheduler may regard the attempt as superseded.
        """
        held = Attempt(attempt.request_id, epoch)
        if booking := self._holds(attempt):
            self.hold(replace(booking, attempt=held), self._lease_s)
        return held

    def prefilled(self, attempt: Attempt) -> None:
        if booking := self._holds(attempt):
            self._put(attempt.request_id, replace(booking, prefilled=True))
        self._add(attempt_to_wire(attempt))

    def shared(self, attempt: Attempt, blocks: int) -> None:
        """Report that other requests share `blocks` of the attempt's KV blocks on the decode worker."""
        if booking := self._holds(attempt):
            booking = replace(booking, blocks=max(0, booking.blocks - blocks))
            self._put(attempt.request_id, booking)
            self._add(pb.Shared(attempt=attempt_to_wire(attempt), blocks=booking.blocks))

    def finished(self, attempt: Attempt, outcome: str, cost: pb.Cost | None = None, *, kept: int = 0) -> None:
        """Report the end of an attempt. Outcomes: stop, length, abort, error or retried. Idempotent.

        kept: the key of an image whose embeddings the encode worker now has
        """
        if self._holds(attempt):
            self._put(attempt.request_id, None)
        if not self.exchanges[self._home()].answered:
            self.on_released()  # a placement without a scheduler can use the room at once
        self._add(pb.Finished(attempt=attempt_to_wire(attempt), outcome=outcome, cost=cost, kept=kept))

    def saw_generation(self, generation: str, scheduler: str) -> None:
        """Report everything to this scheduler again if its generation is new."""
        self.exchanges[scheduler].saw_generation(generation)

    async def close(self) -> None:
        """Stop renewing, and send queued events within `CLOSE_S`."""
        for request_id in [*self._held]:
            self._put(request_id, None)
        await asyncio.gather(*(one.close() for one in self.exchanges.values()))

    def _add(self, event: Event, but: str = "") -> None:
        for address, exchange in self.exchanges.items():
            if address != but:
                exchange.add(event)

    def _give_back(self, placed: pb.Placement) -> None:
        self.finished(Attempt(placed.request_id, placed.epoch), "abort")

    def _released(self, address: str) -> None:
        if self._is_home(address) or not self.exchanges[address].answered:
            self.on_released()

    def _is_home(self, address: str) -> bool:
        return len(self.exchanges) == 1 or address == self._home()

    def _holds(self, attempt: Attempt) -> Booking | None:
        booking = self._held.get(attempt.request_id)
        return booking if booking and booking.attempt == attempt else None

    def _put(self, request_id: str, booking: Booking | None) -> None:
        if before := self._held.get(request_id):
            for worker_id, share in before.shares():
                self.reserved[worker_id].take(share)
                if self.reserved[worker_id].empty:
                    del self.reserved[worker_id]
        if booking is None:
            del self._held[request_id]
            return
        self._held[request_id] = booking
        for worker_id, share in booking.shares():
            self.reserved.setdefault(worker_id, Reserved()).add(share)
