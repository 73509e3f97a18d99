"""Queue the waiting requests of one class: round-robin over tenants, and over each tenant's clients.

Tenants take turns by stride scheduling (Waldspurger and Weihl, 1995): the tenant with the lowest pass value
is next, and each turn adds 1/weight to it. A tenant that was not waiting joins at the current pass value.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from baton.services.classes import ServiceClass
from baton.services.router.state import Party


class Turn(asyncio.Event):
    """Set while it is the request's turn. A request that goes first may take the turn away."""


class _Tenant:
    """The waiting requests of one tenant by client, in the order of turns."""

    def __init__(self) -> None:
        self.weight = 1
        self.way = 0.0
        self.waiting = 0
        self.clients: OrderedDict[str, OrderedDict[Turn, None]] = OrderedDict()

    @property
    def first(self) -> Turn:
        return next(iter(next(iter(self.clients.values()))))

    def before(self, client: str) -> int:
        """Return how many of the tenant's requests go before the client's next one."""
        own = len(self.clients.get(client, ()))
        return own + sum(min(len(turns), own + 1) for name, turns in self.clients.items() if name != client)


class ClassQueue:
    """The waiting requests of one class."""

    def __init__(self, service: ServiceClass) -> None:
        self.service = service
        self.waiting = 0
        self.placed = 0  # admitted requests of the class that have not ended
        self.since = 0.0  # when the queue became non-empty, or a request was last placed from it
        self.owed_until = 0.0  # until then it goes before other classes
        self.rests_until = 0.0  # until then it may not do so again
        self._tenants: dict[str, _Tenant] = {}
        self._way = 0.0  # pass value of the tenant that had the last turn

    @property
    def first(self) -> Turn:
        """The next request's turn."""
        return min((one for one in self._tenants.values() if one.waiting), key=lambda one: one.way).first

    def join(self, party: Party, turn: Turn) -> None:
        tenant = self._tenants.setdefault(party.tenant, _Tenant())
        if not tenant.waiting:  # turns are not saved up
            tenant.way = max(tenant.way, self._way)
        tenant.weight = party.weight
        tenant.clients.setdefault(party.client, OrderedDict())[turn] = None
        self.waiting += 1
        tenant.waiting += 1

    def leave(self, party: Party, turn: Turn) -> None:
        """Remove a request. If it had the turn, its tenant and client move back in the order."""
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
        """Return how many requests go before the client's next one."""
        mine = self._tenants.get(party.tenant)
        own = mine.before(party.client) if mine is not None else 0
        others = (tenant for name, tenant in self._tenants.items() if name != party.tenant)
        return own + sum(min(one.waiting, (own + 1) * one.weight / party.weight) for one in others)

    def clear(self) -> None:
        """Forget past turns."""
        self._tenants.clear()
