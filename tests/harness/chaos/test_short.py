"""A kill and a hang of workers under load, in real processes, watched by Prometheus.

`make chaos` and `python -m bench faults` run for longer.
"""

import asyncio
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from deploy.boards.__main__ import BOARDS
from deploy.boards.model import WINDOW
from harness.chaos.plans import PLANS
from harness.chaos.run import run
from harness.prometheus import alertmanager, prometheus, webhook, why_not
from harness.support import eventually

pytestmark = pytest.mark.timeout(400)
SEED = 1
PLAN = PLANS["short"]
MISSING = why_not("prometheus", "promtool", "prometheus-alertmanager")
watched = pytest.mark.skipif(bool(MISSING), reason=MISSING)
PANELS = [
    pytest.param(panel, id=f"{board.title}: {row.title}: {panel.title}")
    for board in BOARDS
    for row in board.rows
    for panel in row.panels
]
# Metrics that this run may not have, and why.
WITHOUT = {
    "baton_router_tenant": "the routers have no tenants",
    "baton_certificate": "there is no TLS",
    "baton_router_clients_refused_total": "no client is refused",
    "baton_router_rejections_total": "there may always be room",
    "baton_scheduler_gangs": "there is no gang",
    "baton_scheduler_role_changes_total": "no worker changes its role",
    "baton_scheduler_stale_epochs_total": "no message may be late",
    "baton_worker_requests_refused_total": "no worker refuses a request",
    "baton_worker_handoffs_load_failed_total": "the faults may hit no handoff",
    "baton_router_wait_seconds": "there may always be room",
    "baton_worker_embeddings": "there is no encode worker",
}
RETRIES = "baton_router_retries_total"


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Run the plan, watched by Prometheus where it is installed."""
    folder = tmp_path_factory.mktemp("short")
    one = SimpleNamespace()
    with ExitStack() as stack:

        def watch(site):
            one.hook = stack.enter_context(webhook())
            manager = stack.enter_context(alertmanager(folder / "alertmanager", one.hook.url))
            # A rate needs two samples of a series, and some series start near the end of the run.
            watching = prometheus(folder / "prometheus", site.target_urls, manager, scrape_s=1)
            one.server = stack.enter_context(watching)

            def all_up():
                targets = one.server.targets()
                return len(targets) == len(site.parts) and set(targets.values()) == {"up"}

            eventually(all_up, 30, "each process is scraped")

        one.began = time.time()
        watchers = [] if MISSING else [watch]
        one.outcome = asyncio.run(run(PLAN, SEED, 300.0, folder / PLAN.name, print, *watchers))
        one.ended = time.time()
        print(one.outcome)
        yield one


def test_no_death_costs_an_answer(short):
    assert short.outcome.good, str(short.outcome)
    assert sum(short.outcome.faults.values()) == len(PLAN.faults)
    assert short.outcome.requests > PLAN.clients


@watched
def test_alertmanager_notifies_a_webhook_of_the_worker_that_died(short):
    eventually(lambda: "BatonWorkerLost" in short.hook.names(), 20, f"it is told: {short.hook.heard}")
    alerts = [alert for message in short.hook.heard for alert in message["alerts"]]
    (lost, *_) = [alert for alert in alerts if alert["labels"]["alertname"] == "BatonWorkerLost"]
    assert lost["labels"]["role"] in ("prefill", "decode")
    assert lost["annotations"]["runbook"] == "docs/runbooks/BatonWorkerLost.md"


@watched
@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_has_samples(short, panel):
    without = {**WITHOUT, **({} if short.outcome.retries else {RETRIES: "the kill hit no request"})}
    for query in panel.queries:
        if any(name in query.expr for name in without):
            continue
        expr = query.expr.replace(WINDOW, "30s").replace("[1h]", "[1m]")
        # Every second: the kill may come last and leave few samples.
        assert short.server.range(expr, short.began, short.ended, step_s=1), query.expr


@watched
def test_every_role_was_scraped(short):
    found = short.server.range("count by (role) (up)", short.began, short.ended)
    assert {one["metric"]["role"] for one in found} == {"scheduler", "router", "prefill", "decode"}
