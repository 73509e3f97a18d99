"""Enforce all limits of a caller: its key's and its tenant's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from baton.keeping import keep
from baton.services.tenants.model import Caller, Limits, OverLimit
from baton.services.tenants.rates import Rate, Rates
from baton.services.tenants.shared import SharedStore
from baton.services.tenants.slots import SlotLimit, Slots
from baton.tasks import stop

_NOUNS = {
    "requests_per_s": "requests a second",
    "tokens_per_min": "tokens a minute",
    "concurrency": "requests at a time",
}


# One limit of one owner, counted first in this router (`_here`), then in the count that all routers share.
# To take returns None, or the seconds until it may succeed; a negative amount is given back without a check.
# The router's own count is never above the shared one, so a refusal by it needs no Redis call. While Redis is
# down, it alone applies.
Limit = Rate | SlotLimit


class Quotas:
    """The limits of all callers of one router's process."""

    def __init__(self, shared: SharedStore | None, router_id: str, processes: int = 1) -> None:
        """Share limits through `shared`, or without it divide them among this router's processes."""
        self._shared = shared
        parts = processes if shared is None else 1
        self._rates = Rates(shared, parts)
        self._slots = Slots(shared, router_id, parts)
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._shared is not None:
            self._shared.start()
            self._renewing = keep(self._slots.renew, "renew the requests under way")

    async def close(self) -> None:
        if self._renewing is not None:
            await stop(self._renewing)
        if self._shared is not None:
            await self._shared.close()

    async def enter(self, caller: Caller) -> Visit:
        """Admit one HTTP request. Raises OverLimit."""
        slots: list[tuple[str, Limit]] = [
            (owner, SlotLimit(self._slots, owner, of.concurrency))
            for owner, of in _owners(caller)
            if of.concurrency
        ]
        rates = list(self._rates_of(caller, "requests_per_s"))
        await self._take([*slots, *rates], 1)
        return Visit(self, caller, [slot for _, slot in slots])

    async def charge(self, caller: Caller, tokens: int) -> list[Limit]:
        """Charge a sequence's tokens. Return the limits charged. Raises OverLimit."""
        rates = list(self._rates_of(caller, "tokens_per_min"))
        await self._take(rates, tokens)
        return [rate for _, rate in rates]

    def _rates_of(self, caller: Caller, field: str) -> Iterator[tuple[str, Limit]]:
        for owner, of in _owners(caller):
            if most := getattr(of, field):
                yield owner, Rate(self._rates, field, owner, most)

    async def _take(self, limits: Sequence[tuple[str, Limit]], amount: int) -> None:
        for at, (owner, limit) in enumerate(limits):
            wait_s = limit.take_here(amount)
            if wait_s is not None:
                for _, taken in limits[:at]:
                    taken.give_here(amount)
                raise _over(owner, limit, amount, wait_s)
        shared: list[Limit] = []
        try:
            for owner, limit in limits:
                wait_s = await limit.take_shared(amount)
                if wait_s is not None:
                    raise _over(owner, limit, amount, wait_s)
                shared.append(limit)
        except BaseException:  # including cancellation, if the client disconnects
            for _, taken in limits:
                taken.give_here(amount)
            for taken in shared:
                taken.give_shared(amount)
            raise


class Visit:
    """One HTTP request within its caller's limits: its slots, and the tokens of its sequences."""

    def __init__(self, quotas: Quotas, caller: Caller, slots: list[Limit]) -> None:
        self.caller = caller
        self._quotas = quotas
        self._slots = slots
        self._charges: dict[
            str, tuple[list[Limit], int]
        ] = {}  # keyed by sequence: the limits charged, tokens

    async def charge(self, sequence: str, prompt: int, most: int) -> None:
        """Charge the tokens of a prompt and of the longest possible answer. Raises OverLimit.

        If that exceeds a minute's limit, the whole limit is charged: the answer may turn out short.
        """
        allowed = [of.tokens_per_min for _, of in _owners(self.caller) if of.tokens_per_min]
        if not allowed:
            return
        tokens = max(prompt, min(prompt + most, *allowed))
        self._charges[sequence] = await self._quotas.charge(self.caller, tokens), tokens

    def settle(self, sequence: str, used: int) -> None:
        """Correct a sequence's charge to the tokens it used."""
        limits, tokens = self._charges.pop(sequence, ([], 0))
        _give(limits, tokens - used)

    def leave(self) -> None:
        _give(self._slots, 1)


def _give(limits: Sequence[Limit], amount: int) -> None:
    for limit in limits if amount else ():
        limit.give_here(amount)
        limit.give_shared(amount)


def _owners(caller: Caller) -> Iterator[tuple[str, Limits]]:
    yield f"key:{caller.key}", caller.key_limits
    yield f"tenant:{caller.tenant}", caller.settings


def _over(owner: str, limit: Limit, amount: int, wait_s: float) -> OverLimit:
    kind, _, name = owner.partition(":")
    rule = f"{kind} {name!r} is limited to {limit.most} {_NOUNS[limit.field]} ({limit.field})"
    if limit.field == "tokens_per_min":
        rule += f", and this request needs {amount}"
        if amount > limit.most:
            return OverLimit(f"{rule}: it can never be admitted", limit.field, 0.0)
    return OverLimit(f"{rule}; try again in {wait_s:.3g} s", limit.field, wait_s)
