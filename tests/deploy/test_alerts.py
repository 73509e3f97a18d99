"""Each alert fires in its cases, and not in similar ones (`promtool test rules`)."""

from collections import namedtuple

import pytest
import yaml

from deploy.boards.alerts import ALERTS, EVERY_S, FILE
from harness.prometheus import why_not
from harness.support import ran

pytestmark = pytest.mark.skipif(bool(why_not("promtool")), reason=why_not("promtool"))


# Series, and the labels of the alerts that must fire after a time.
Case = namedtuple("Case", "about series after_s fires", defaults=[()])


def fires(about, series, after_s=120, **labels):
    return Case(about, series, after_s, (labels,))


def quiet(about, series, after_s=120):
    return Case(about, series, after_s)


# Alerts over hours have fewer scrapes: promtool takes a minute for 5,000 of them.
SELDOM_S = 60
SELDOM = {"BatonErrorBudgetBurns", "BatonErrorBudgetBurnsFast", "BatonPrefixHitsCollapsed"}


def scrapes(seconds, every_s=EVERY_S):
    return seconds // every_s


def flat(value, seconds=900):
    return f"{value}x{scrapes(seconds)}"


def growing(each_s, seconds=900, begin=0, every_s=EVERY_S):
    return f"{begin}+{each_s * every_s}x{scrapes(seconds, every_s)}"


def once(at_s, seconds=900):
    """Return a counter that goes from 0 to 1 at this time."""
    return f"0x{scrapes(at_s) - 1} 1x{scrapes(seconds - at_s)}"


UP = {'up{role="scheduler", instance="s"}': flat(1), "baton_router_scheduler_up": flat(1)}
REQUESTS = "baton_router_requests_total"
HITS, LOOKED_UP = "baton_worker_prefix_cache_hits_total", "baton_worker_prefix_cache_queries_total"
THREE = "0x11 1x24 2x24 3x60"
ATTEMPTS = 'baton_router_request_attempts_bucket{{le="{}"}}'


def attempts(all_s, first_s):
    return {
        ATTEMPTS.format("1.0"): growing(first_s),
        ATTEMPTS.format("+Inf"): growing(all_s),
        "baton_router_request_attempts_count": growing(all_s),
    }


def queues(prefill, decode, running=0):
    found = {}
    for role, waiting in (("prefill", prefill), ("decode", decode)):
        found[f'baton_worker_requests_waiting{{role="{role}", instance="{role}"}}'] = flat(waiting)
        found[f'baton_worker_requests_running{{role="{role}", instance="{role}"}}'] = flat(running)
    return found


def seldom(each_s, seconds, begin=0):
    return growing(each_s, seconds, begin, SELDOM_S)


def errors(share, hours):
    seconds = int(hours * 3600)
    return {
        f'{REQUESTS}{{outcome="error"}}': seldom(10 * share, seconds),
        f'{REQUESTS}{{outcome="stop"}}': seldom(10 * (1 - share), seconds),
        f'{REQUESTS}{{outcome="abort"}}': seldom(10, seconds),
    }


def prefixes(before_s, then_s):
    """Return hits per second for an hour and then for 20 minutes, of 100 queries per second."""
    later = seldom(then_s, 1200, begin=3600 * before_s + SELDOM_S * then_s)
    return {HITS: f"{seldom(before_s, 3600)} {later}", LOOKED_UP: seldom(100, 4860)}


def handoffs(avoided, recomputed):
    return {
        "baton_router_pairs_avoided_total": avoided,
        "baton_router_recomputed_prompts_total": recomputed,
        PAIRS: growing(10),
    }


def embeddings(failed, images=None):
    return {
        'baton_worker_embeddings_load_failed_total{error="SourceLost"}': failed,
        'baton_router_images_computed_total{where="encode"}': images or growing(10),
    }


def waiting(requests, seconds):
    return {"baton_router_waiting_requests": requests, "baton_router_waiting_estimate_seconds": flat(seconds)}


def ready(prefill, decode, mixed):
    values = zip(("prefill", "decode", "mixed"), (prefill, decode, mixed), strict=True)
    return {f'baton_scheduler_workers{{role="{role}", state="ready"}}': value for role, value in values}


def certificate(left_s):
    labels = '{instance="d", role="decode"}'
    return {
        f"baton_certificate_left_seconds{labels}": flat(left_s),
        f"baton_certificate_life_seconds{labels}": flat(3600),
    }


AWAY = "1x5 0x50"
AGAIN = "100x10 200x50"  # the start time of a restarted process
ROUTER = 'up{role="router", instance="r"}'
SCHEDULER = 'up{role="scheduler", instance="s"}'
LOST = 'baton_scheduler_workers_lost_total{role="decode"}'
SAW = 'baton_scheduler_workers_lost_total{role="decode", instance="%s"}'
PAIRS = 'baton_router_placements_total{kind="pair"}'
ALONE = "baton_router_placements_without_scheduler_total"
REJECTED = 'baton_router_rejections_total{code="%s"}'
OVERDUE = 'baton_worker_handoffs_pinned_overdue_seconds{instance="p"}'
SILENT = 'baton_worker_acceptance_alarm{instance="d", method="mtp", role="decode"}'
IDLE_ENCODERS = {
    f'baton_worker_requests_{what}{{instance="e", role="encode"}}': flat(0) for what in ("running", "waiting")
}
OFFSET = 'baton_worker_clock_offset_seconds{instance="d"}'
STORE, STORE_LOSSES = "baton_scheduler_store_up", "baton_scheduler_store_losses_total"
# fmt: off
CASES = {
    "BatonSchedulerAway": [
        fires("routers reach none", {"baton_router_scheduler_up": AWAY}, 60),
        fires("none answered for a moment", UP | {"baton_router_scheduler_losses_total": once(60)}, 70),
        fires("it does not answer Prometheus", UP | {SCHEDULER: AWAY}, 60),
        fires("it was started again", UP | {'process_start_time_seconds{role="scheduler"}': AGAIN}, 65),
        quiet("all is well", UP | {"baton_router_scheduler_losses_total": flat(3)}),
        quiet("a router was started again", {'process_start_time_seconds{role="router"}': AGAIN}, 65),
    ],
    "BatonStoreAway": [
        fires("it does not answer", {STORE: AWAY}, 60),
        fires("for a moment, between two scrapes", {STORE: flat(1), STORE_LOSSES: once(60)}, 70),
        quiet("it was away yesterday", {STORE_LOSSES: flat(2)}),
    ],
    "BatonPlacingAlone": [
        fires("one placement", {ALONE: once(60)}, 70),
        quiet("long ago", {ALONE: flat(9)}),
    ],
    "BatonWorkerLost": [
        fires("one", {LOST: once(60)}, 70, role="decode"),
        quiet("a minute later", {LOST: once(60)}, 200),
    ],
    "BatonWorkerRestarting": [
        fires("three in ten minutes, seen by two schedulers", {SAW % "s1": THREE, SAW % "s2": THREE}, 400,
              role="decode"),
        quiet("one", {LOST: once(60)}, 70),
    ],
    "BatonProcessDown": [
        fires("a router", {ROUTER: AWAY}, 45, role="router", instance="r"),
        quiet("one scrape failed", {ROUTER: "1x5 0 1x50"}, 35),
        quiet("somebody else's process", {'up{job="node"}': flat(0)}),
        quiet("a scheduler has an alert of its own", {'up{role="scheduler"}': flat(0)}),
    ],
    "BatonSideMissing": [
        fires("no prefill worker", ready(AWAY, flat(1), flat(0)), 60, role="prefill"),
        quiet("mixed workers alone", ready(flat(0), flat(0), flat(1))),
        quiet("nothing has started yet", ready(flat(0), flat(0), flat(0))),
    ],
    "BatonSideStarving": [
        fires("decode is full, prefill idle", queues(0, 9), role="decode"),
        quiet("both are busy", queues(0, 9, running=5)),
        quiet("for a moment", queues(0, 9), 30),
        quiet("both are idle", queues(0, 0)),
        quiet("no image comes to the encode workers", queues(9, 9, running=5) | IDLE_ENCODERS),
    ],
    "BatonQueueGrowing": [
        fires("more each second", waiting(growing(1), 10), 200),
        quiet("long, but no longer than before", waiting(flat(99), 10), 200),
        fires("full, and flat", {"baton_router_waiting_requests": flat(2048), REJECTED % "QUEUE": growing(1)},
              200),
        quiet("one does not fit", {REJECTED % "JOURNAL": once(60)}, 100),
        quiet("it goes quickly", waiting(growing(1), 1), 200),
    ],
    "BatonRetries": [
        fires("one in ten", attempts(10, 9)),
        quiet("one in a thousand", attempts(10, 9.99)),
        quiet("no requests", attempts(0, 0)),
    ],
    "BatonHandoffsFailing": [
        fires("recomputed", handoffs(flat(0), growing(1))),
        fires("a pair is cut", handoffs(growing(1), flat(0))),
        fires("not saved", {"baton_worker_handoffs_save_failed_total": growing(1), PAIRS: growing(10)}),
        quiet("one in a thousand", handoffs(flat(0), growing(0.01))),
    ],
    "BatonEmbeddingsFailing": [
        fires("one in ten", embeddings(growing(1))),
        quiet("one in a thousand", embeddings(growing(0.01))),
        quiet("no images", embeddings(flat(3), images=flat(9))),
    ],
    "BatonKVPinned": [
        fires("for a minute beyond its lease", {OVERDUE: growing(1)}, 60, instance="p"),
        quiet("a while", {OVERDUE: flat(20)}),
    ],
    "BatonDrafterSilent": [
        fires("the worker says so", {SILENT: flat(1)}, instance="d", method="mtp"),
        quiet("it does not", {SILENT: flat(0)}),
    ],
    "BatonPrefixHitsCollapsed": [
        fires("from half to a tenth", prefixes(50, 10), 4500),
        quiet("as always", prefixes(50, 50), 4500),
        quiet("there was never much", prefixes(5, 0), 4500),
    ],
    "BatonErrorBudgetBurnsFast": [
        fires("3 %", errors(0.03, 1), 3000),
        quiet("1 %", errors(0.01, 1), 3000),
    ],
    "BatonErrorBudgetBurns": [
        fires("1 %", errors(0.01, 7), 7 * 3600 - 300),
        quiet("one in two thousand", errors(0.0005, 7), 7 * 3600 - 300),
    ],
    "BatonCertificateEnding": [
        fires("half of its second half is over", certificate(800), instance="d", role="decode"),
        quiet("it is being renewed", certificate(1700)),
    ],
    "BatonClockSkew": [
        fires("behind", {OFFSET: flat(5)}, instance="d"),
        fires("before", {OFFSET: flat(-5)}, instance="d"),
        quiet("a slow heartbeat", {OFFSET: flat(0.2)}),
    ],
}
# fmt: on


def test_every_alert_has_positive_and_negative_cases():
    assert set(CASES) == {one.name for one in ALERTS}
    for name, cases in CASES.items():
        assert {bool(case.fires) for case in cases} == {True, False}, name


@pytest.mark.parametrize("name", CASES)
def test_alert(name, tmp_path):
    done = promtool(tmp_path, name, CASES[name])
    assert done.returncode == 0, done.stdout + done.stderr


def promtool(folder, name, cases):
    """Test the alert's rule, and rules that record, without annotations."""
    every = f"{SELDOM_S if name in SELDOM else EVERY_S}s"
    content = yaml.safe_load(FILE.read_text())
    severity = {}
    for group in content["groups"]:
        group["interval"] = every
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert") in (None, name)]
    for rule in (one for group in content["groups"] for one in group["rules"]):
        rule.pop("annotations", None)
        severity[rule.get("alert")] = rule.get("labels", {}).get("severity")
    (folder / "rules.yaml").write_text(yaml.safe_dump(content))

    def test(case):
        series = [{"series": key, "values": values} for key, values in case.series.items()]
        fires = [{"exp_labels": {"severity": severity[name], **labels}} for labels in case.fires]
        alert = {"alertname": name, "eval_time": f"{case.after_s}s", "exp_alerts": fires}
        return {"name": case.about, "interval": every, "input_series": series, "alert_rule_test": [alert]}

    tests = [test(case) for case in cases]
    wanted = {"rule_files": ["rules.yaml"], "evaluation_interval": every, "tests": tests}
    (folder / "test.yaml").write_text(yaml.safe_dump(wanted))
    return ran("promtool", "test", "rules", "test.yaml", cwd=folder)
