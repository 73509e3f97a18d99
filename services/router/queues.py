"""The requests of one class that wait in a router: tenants take turns, and so do the clients of each.

The turns of tenants are stride scheduling (Waldspurger and Weihl, 1995): the next is the one that has gone
the least way, and each turn takes it 1/weight further; one that was not waiting begins where the others are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from baton.services.classes import ServiceClass
from baton.services.router.state import Party


class Turn(asyncio.Event):
    """One request's turn: set while it has it. It may be taken away by one that goes before."""


class _Tenant:
    """The requests of one tenant that wait, by client; the next in turn first."""

    def __init__(self) -> None:
        self.weight = 1
        self.way = 0.0
        self.waiting = 0
        self.clients: OrderedDict[str, OrderedDict[Turn, None]] = OrderedDict()

    @property
    def first(self) -> Turn:
        """The turn of the request that is next."""
        return next(iter(next(iter(self.clients.values()))))

    def before(self, client: str) -> int:
        """Return how many of its requests go before the client's next one."""
        own = len(self.clients.get(client, ()))
        return own + sum(min(len(turns), own + 1) for name, turns in self.clients.items() if name != client)


class ClassQueue:
    """The requests of one class that wait."""

    def __init__(self, service: ServiceClass) -> None:
        self.service = service
        self.waiting = 0
        self.placed = 0  # requests of the class that were admitted and are not over
        self.since = 0.0  # on the clock: it waits, or has last been placed
        self.owed_until = 0.0  # on the clock; while it goes before others
        self.rests_until = 0.0  # on the clock; before it does so again
        self._tenants: dict[str, _Tenant] = {}
        self._way = 0.0  # of the tenant that had the last turn

    @property
    def first(self) -> Turn:
        """The turn of the request that is next: of the tenant that is behind."""
        return min((one for one in self._tenants.values() if one.waiting), key=lambda one: one.way).first

    def join(self, party: Party, turn: Turn) -> None:
        """Let a request wait."""
        tenant = self._tenants.setdefault(party.tenant, _Tenant())
        if not tenant.waiting:  # what it did not use is not saved up
            tenant.way = max(tenant.way, self._way)
        tenant.weight = party.weight
        tenant.clients.setdefault(party.client, OrderedDict())[turn] = None
        self.waiting += 1
        tenant.waiting += 1

    def leave(self, party: Party, turn: Turn) -> None:
        """Let a request go, which may have had its turn."""
        tenant = self._tenants[party.tenant]
        turns = tenant.clients[party.client]
        del turns[turn]
        if not turns:
            del tenant.clients[party.client]
        if turn.is_set():  # it has had its turn
            if turns:
                tenant.clients.move_to_end(party.client)
            self._way = tenant.way
            tenant.way += 1 / tenant.weight
        self.waiting -= 1
        tenant.waiting -= 1

    def before(self, party: Party) -> float:
        """Return how many go before the client's next one."""
        mine = self._tenants.get(party.tenant)
        own = mine.before(party.client) if mine is not None else 0
        others = (tenant for name, tenant in self._tenants.items() if name != party.tenant)
        return own + sum(min(one.waiting, (own + 1) * one.weight / party.weight) for one in others)

    def clear(self) -> None:
        """Forget who had turns: a queue begins."""
        self._tenants.clear()
