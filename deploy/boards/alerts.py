"""Alerts, and the rates that they are made of. Each has a page in docs/runbooks by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

EVERY_S = 5  # between two looks at the rules, and two scrapes
GOAL = 0.999  # of requests without an error
RUNBOOKS = "docs/runbooks"


@dataclass(frozen=True)
class Alert:
    """An alert. `summary` may use Prometheus' templates."""

    name: str
    expr: str
    summary: str
    for_s: int = 0
    severity: str = "warning"  # critical: somebody should get up


@dataclass(frozen=True)
class Record:
    """A rate that is computed once."""

    name: str
    expr: str


def _errors(window: str) -> str:
    return (
        f'sum(rate(baton_router_requests_total{{outcome=~"error|refused"}}[{window}])) / '
        f'sum(rate(baton_router_requests_total{{outcome!="abort"}}[{window}]))'
    )


_RATIO = "baton:request_errors:ratio_rate"  # and its window
RECORDS = [Record(f"{_RATIO}{window}", _errors(window)) for window in ("5m", "30m", "1h", "6h")]

_HITS, _LOOKED_UP = "baton_worker_prefix_cache_hits_total", "baton_worker_prefix_cache_queries_total"


def _found(window: str, offset: str = "") -> str:
    return f"(sum(rate({_HITS}[{window}]{offset})) / sum(rate({_LOOKED_UP}[{window}]{offset})))"


def _burn(factor: float, long: str, short: str) -> str:
    limit = f"{factor * (1 - GOAL):.4f}"
    over = (f"baton:request_errors:ratio_rate{window} > {limit}" for window in (long, short))
    return " and ".join(over)


_READY = 'max by (role) (baton_scheduler_workers{state="ready"'
_WAITING = "avg by (role) (baton_worker_requests_waiting)"
_BUSY = "avg by (role) (baton_worker_requests_running + baton_worker_requests_waiting)"

ALERTS = [
    Alert(
        "BatonSchedulerAway",
        "min(baton_router_scheduler_up) == 0"
        " or sum(increase(baton_router_scheduler_losses_total[1m])) > 0"
        ' or max(up{role="scheduler"} == bool 0) > 0'
        ' or max(changes(process_start_time_seconds{role="scheduler"}[1m])) > 0',
        "A scheduler does not answer, or was started again.",
        severity="critical",
    ),
    Alert(
        "BatonStoreAway",
        "min(baton_scheduler_store_up) == 0 or sum(increase(baton_scheduler_store_losses_total[1m])) > 0",
        "The schedulers' store does not answer: requests go on, drains and orders wait.",
    ),
    Alert(
        "BatonPlacingAlone",
        "sum(increase(baton_router_placements_without_scheduler_total[1m])) > 0",
        "Routers place requests themselves, as no scheduler answers.",
    ),
    Alert(
        "BatonWorkerLost",
        "max by (role) (increase(baton_scheduler_workers_lost_total[1m])) > 0",
        "A {{ $labels.role }} worker went without a word: it died, hangs, or is cut off.",
    ),
    Alert(
        "BatonWorkerRestarting",
        "max by (role) (increase(baton_scheduler_workers_lost_total[10m])) > 2.5",
        "{{ $labels.role }} workers die again and again.",
        severity="critical",
    ),
    Alert(
        "BatonProcessDown",
        'up{role=~"router|prefill|decode|mixed"} == 0',
        "{{ $labels.role }} {{ $labels.instance }} does not answer Prometheus.",
        for_s=10,
    ),
    Alert(
        "BatonSideMissing",
        f'({_READY}, role=~"prefill|decode"}}) == 0)'
        ' and on () (max(baton_scheduler_workers{state="ready", role="mixed"}) == 0)'
        ' and on () (max(baton_scheduler_workers{state="ready"}) > 0)',
        "No {{ $labels.role }} worker is ready: the others do its work.",
        severity="critical",
    ),
    Alert(
        "BatonSideStarving",
        f"({_WAITING} > 4) and on () (min({_BUSY}) < 0.5)",
        "Requests queue at the {{ $labels.role }} workers while the other side is idle.",
        for_s=60,
    ),
    Alert(
        "BatonQueueGrowing",
        "(sum(baton_router_waiting_requests) > 20) and (sum(deriv(baton_router_waiting_requests[2m])) > 0)"
        " and (max(baton_router_waiting_estimate_seconds) > 5)"
        ' or sum(increase(baton_router_rejections_total{code=~"QUEUE|JOURNAL"}[1m])) > 5',
        "More requests come than the workers can take: they wait longer and longer, or are refused.",
        for_s=60,
    ),
    Alert(
        "BatonRetries",
        'sum(increase(baton_router_request_attempts_bucket{le="+Inf"}[1m]))'
        ' - sum(increase(baton_router_request_attempts_bucket{le="1.0"}[1m]))'
        " > 0.01 * sum(increase(baton_router_request_attempts_count[1m]))",
        "More than 1 % of the requests needed another attempt.",
    ),
    Alert(
        "BatonHandoffsFailing",
        "sum(increase(baton_router_recomputed_prompts_total[1m]))"
        " + sum(increase(baton_router_pairs_avoided_total[1m]))"
        " > 0.01 * sum(increase(baton_router_placements_total[1m]))"
        " or sum(increase(baton_worker_handoffs_save_failed_total[1m]))"
        " > 0.01 * sum(increase(baton_router_placements_total[1m]))",
        "More than 1 % of the handoffs fail, or are avoided as the two workers do not reach each other.",
    ),
    Alert(
        "BatonKVPinned",
        "max by (instance) (baton_worker_handoffs_pinned_overdue_seconds) > 30",
        "{{ $labels.instance }} keeps KV {{ $value | humanizeDuration }} beyond its lease.",
    ),
    Alert(
        "BatonDrafterSilent",
        "max by (instance, method) (baton_worker_acceptance_alarm) == 1",
        "The drafts of {{ $labels.instance }} ({{ $labels.method }}) are accepted too seldom.",
    ),
    Alert(
        "BatonPrefixHitsCollapsed",
        f"{_found('5m')} < 0.5 * {_found('1h', ' offset 5m')} and {_found('1h', ' offset 5m')} > 0.1"
        f" and sum(rate({_LOOKED_UP}[5m])) > 10",
        "The prefix caches find less than half of what they found in the hour before.",
        for_s=120,
    ),
    Alert(
        "BatonErrorBudgetBurnsFast",
        _burn(14.4, "1h", "5m"),
        f"At this rate the errors of a month ({1 - GOAL:.1%} of the requests) are used up in two days.",
        severity="critical",
    ),
    Alert(
        "BatonErrorBudgetBurns",
        _burn(6, "6h", "30m"),
        f"At this rate the errors of a month ({1 - GOAL:.1%} of the requests) are used up in five days.",
        for_s=60,
    ),
    Alert(
        "BatonCertificateEnding",
        "baton_certificate_left_seconds < 0.3 * baton_certificate_life_seconds",
        "The certificate of {{ $labels.instance }} ends in {{ $value | humanizeDuration }}, not renewed.",
    ),
    Alert(
        "BatonClockSkew",
        "abs(avg_over_time(baton_worker_clock_offset_seconds[30s])) > 1",
        "The clock of {{ $labels.instance }} is {{ $value | humanizeDuration }} off the scheduler's.",
    ),
]


def rules() -> str:
    """Return the file of rules for Prometheus."""
    groups: list[dict[str, Any]] = [
        {
            "name": "baton-rates",
            "interval": f"{EVERY_S}s",
            "rules": [{"record": one.name, "expr": one.expr} for one in RECORDS],
        },
        {"name": "baton", "interval": f"{EVERY_S}s", "rules": [_rule(one) for one in ALERTS]},
    ]
    head = "# Written by `make dashboards` from deploy/boards/alerts.py.\n"
    return head + yaml.safe_dump({"groups": groups}, sort_keys=False, width=110)


def _rule(one: Alert) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": one.name, "expr": one.expr}
    if one.for_s:
        rule["for"] = f"{one.for_s}s"
    return rule | {
        "labels": {"severity": one.severity},
        "annotations": {"summary": one.summary, "runbook": f"{RUNBOOKS}/{one.name}.md"},
    }
