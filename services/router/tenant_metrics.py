"""The router's metrics by tenant. Where keys have no tenants there are none."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.services.router.living_series import LivingSeries

MAX_TENANTS = 1_000  # with series of their own: some ten each
OTHERS = "(others)"  # the tenant that further ones are counted as; no name of a tenant has such characters


class TenantMetrics:
    """Counters of each tenant; those of a tenant that was removed end some minutes later."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._series = series = LivingSeries("tenant", registry, clock)
        self._counts: Counts[str] = Counts()  # that wait, of tenants of which any do
        self._requests = series.keep(
            Counter(
                "baton_router_tenant_requests_total",
                "HTTP requests of a tenant that were admitted",
                ["tenant"],
                registry=registry,
            )
        )
        self._refused = series.keep(
            Counter(
                "baton_router_tenant_refusals_total",
                "Requests of a tenant refused with 429, by limit",
                ["tenant", "limit"],
                registry=registry,
            )
        )
        self._tokens = series.keep(
            Counter(
                "baton_router_tenant_tokens_total",
                "Tokens of a tenant's completed requests, by kind: prompt or output",
                ["tenant", "kind"],
                registry=registry,
            )
        )
        self._waiting = series.keep(
            Gauge(
                "baton_router_tenant_waiting_requests",
                "Requests of a tenant that wait for room on the workers",
                ["tenant"],
                registry=registry,
            )
        )

    def watch(self, known: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns the names of all tenants. Any thread."""
        self._series.watch(known)

    def entered(self, tenant: str) -> None:
        """Count an HTTP request that was admitted."""
        if label := self._label(tenant):
            self._requests.labels(label).inc()

    def refused(self, tenant: str, limit: str) -> None:
        """Count a request beyond a limit."""
        if label := self._label(tenant):
            self._refused.labels(label, limit).inc()

    def used(self, tenant: str, prompt: int, output: int) -> None:
        """Count the tokens of a sequence that is over."""
        if label := self._label(tenant):
            self._tokens.labels(label, "prompt").inc(prompt)
            self._tokens.labels(label, "output").inc(output)

    def waiting(self, tenant: str, change: int) -> None:
        """Count a request that waits (1), or no longer does (-1).

        Of tenants without series of their own it is not shown.
        """
        self._counts[tenant] += change
        count = self._counts[tenant]
        if not count:
            del self._counts[tenant]
        if (label := self._label(tenant)) and label != OTHERS:
            self._waiting.labels(label).set(count)  # not inc: its series may have ended meanwhile

    def _label(self, tenant: str) -> str:
        """Return the tenant's label, empty for none."""
        if not tenant:
            return ""
        label = tenant if tenant in self._series or len(self._series) < MAX_TENANTS else OTHERS
        self._series.counted(label)
        return label
