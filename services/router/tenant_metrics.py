"""The router's metrics by tenant."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry

from baton.metrics import Metrics, counter, gauge
from baton.services.router.living_series import LivingSeries

MAX_TENANTS = 1_000  # with series of their own, some ten each
OTHERS = "(others)"  # the label of all further tenants; no tenant's name has such characters


class TenantMetrics(Metrics):
    """Metrics of each tenant. A removed tenant's series are dropped some minutes later."""

    prefix = "baton_router_tenant_"

    _requests = counter("HTTP requests admitted", "tenant")
    _refusals = counter("Requests refused with 429, by limit", "tenant", "limit")
    _tokens = counter("Tokens of completed requests: prompt, output", "tenant", "kind")
    _waiting_requests = gauge("Requests waiting for room on workers", "tenant")

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._series = LivingSeries("tenant", registry, clock)  # before the metrics: scraped in this order
        super().__init__(registry)
        self._series.keep(self.labelled("tenant"))
        self._counts: Counts[str] = Counts()  # waiting requests by tenant, without zeros

    def watch(self, known: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns all tenants' names; it may be called from any thread."""
        self._series.watch(known)

    def entered(self, tenant: str) -> None:
        """Count an admitted HTTP request."""
        if label := self._label(tenant):
            self._requests.labels(label).inc()

    def refused(self, tenant: str, limit: str) -> None:
        """Count a request refused for a limit."""
        if label := self._label(tenant):
            self._refusals.labels(label, limit).inc()

    def used(self, tenant: str, prompt: int, output: int) -> None:
        """Count the tokens of a finished sequence."""
        if label := self._label(tenant):
            self._tokens.labels(label, "prompt").inc(prompt)
            self._tokens.labels(label, "output").inc(output)

    def waiting(self, tenant: str, change: int) -> None:
        """Count a request that joins the queue (1) or leaves it (-1); not for tenants in `OTHERS`."""
        self._counts[tenant] += change
        count = self._counts[tenant]
        if not count:
            del self._counts[tenant]
        if (label := self._label(tenant)) and label != OTHERS:
            self._waiting_requests.labels(label).set(count)  # not inc(): the series may have been dropped

    def _label(self, tenant: str) -> str:
        """Return the tenant's label; "" without a tenant."""
        if not tenant:
            return ""
        label = tenant if tenant in self._series or len(self._series) < MAX_TENANTS else OTHERS
        self._series.counted(label)
        return label
