"""Enforce tenants' limits on the router's requests, and count the requests by tenant.

`services/tenants` has the limits; here a refusal becomes the client's 429.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from baton.keeping import keep
from baton.services.config import Settings
from baton.services.router.errors import RateLimited
from baton.services.router.metrics import RouterMetrics, TenantMetrics
from baton.services.router.state import RequestState
from baton.services.tenants.file_book import FileBook
from baton.services.tenants.keyring import Keyring
from baton.services.tenants.model import Caller, OverLimit
from baton.services.tenants.quotas import Quotas, Visit
from baton.services.tenants.redis_book import RedisBook
from baton.services.tenants.shared import SharedStore
from baton.tasks import stop


@contextlib.asynccontextmanager
async def open_tenancy(
    settings: Settings, router_id: str, metrics: RouterMetrics, store_password: str
) -> AsyncIterator[Tenancy]:
    """Yield the tenancy of these settings; it follows changes to the keys. Raises ConfigError.

    store_password: the password of router.keys_store, if its URL has none
    """
    router, topic = settings.router, settings.scheduler.topic
    shared = SharedStore(router.keys_store, topic, store_password) if router.keys_store else None
    quotas = Quotas(shared, router_id, router.processes)
    keyring = None
    async with contextlib.AsyncExitStack() as stack:
        if router.has_tenants:
            book = (
                FileBook(router.keys_file)
                if router.keys_file
                else RedisBook(router.keys_store, topic, store_password, for_router=True)
            )
            keyring = Keyring(book)
            stack.push_async_callback(keyring.close)
            metrics.tenants.watch(keyring.tenants)
            await keyring.look()
        quotas.start()
        stack.push_async_callback(quotas.close)
        if keyring is not None:
            stack.push_async_callback(stop, keep(keyring.follow, "changes of the keys"))
        yield Tenancy(quotas, metrics, keyring)


class Tenancy:
    """Admits the requests of one router. Without a keyring there are no tenants."""

    def __init__(self, quotas: Quotas, metrics: RouterMetrics, keyring: Keyring | None = None) -> None:
        self.keyring = keyring
        self._quotas = quotas
        self._metrics = metrics.tenants

    async def enter(self, caller: Caller) -> TenantRequest:
        """Admit an HTTP request. Raises RateLimited (429)."""
        try:
            visit = await self._quotas.enter(caller)
        except OverLimit as error:
            raise _refusal(caller, self._metrics, error) from None
        self._metrics.entered(caller.tenant)
        return TenantRequest(visit, self._metrics)


class TenantRequest:
    """One admitted HTTP request. Call `leave` when its response has ended."""

    def __init__(self, visit: Visit, metrics: TenantMetrics) -> None:
        self.caller = visit.caller
        self.leave = visit.leave
        self._visit = visit
        self._metrics = metrics

    async def charge(self, state: RequestState) -> None:
        """Charge a sequence's prompt and maximum output. Raises RateLimited (429)."""
        try:
            await self._visit.charge(state.request_id, state.prompt_tokens, state.budget)
        except OverLimit as error:
            raise _refusal(self.caller, self._metrics, error) from None

    def settle(self, state: RequestState) -> None:
        """Correct the charge of a finished sequence to its actual tokens: none if it was not placed."""
        prompt, output = (state.prompt_tokens, len(state.tokens)) if state.attempts else (0, 0)
        self._visit.settle(state.request_id, prompt + output)
        self._metrics.used(self.caller.tenant, prompt, output)


def _refusal(caller: Caller, metrics: TenantMetrics, error: OverLimit) -> RateLimited:
    metrics.refused(caller.tenant, error.limit)
    return RateLimited(str(error), error.limit, error.retry_after_s)
