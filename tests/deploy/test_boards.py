import json
import re
from functools import cache
from pathlib import Path

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import REGISTRY

from baton.services.router.vllm import metrics as vllm_metrics
from deploy.boards.__main__ import BOARDS, DEPLOY, files, main
from deploy.boards.alerts import ALERTS, RECORDS, RUNBOOKS
from deploy.boards.model import WINDOW
from harness.metric_families import series_names
from harness.prometheus import why_not
from harness.support import ROOT, ran

# Metrics of Prometheus itself, and of vLLM's front end in routers.
OTHERS = {"up", "ALERTS", "vllm:prompt_tokens_total", "vllm:num_preemptions_total"}
OTHERS |= {"vllm:inter_token_latency_seconds_bucket"}
# Metrics that prometheus_client adds on Linux.
PROCESS = {
    name
    for one in REGISTRY.collect()
    for name in (one.name, f"{one.name}_total")
    if name.startswith("process_")
}
RECORDED = {one.name for one in RECORDS}
OPS = ("prometheus", "alertmanager", "grafana", "collector", "tempo")


def names_in(expr):
    """Return the metrics in a PromQL expression. Raises ValueError."""
    tree = promql_parser.parse(expr.replace(WINDOW, "1m"))
    found = set()

    def walk(node):
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name)
        for part in ("expr", "lhs", "rhs", "param", "vector_selector", "vs", "args"):
            below = getattr(node, part, None)
            if below is not None:
                for one in below if isinstance(below, list) else [below]:
                    walk(one)

    walk(tree)
    return found


@cache
def known():
    return frozenset(series_names() | OTHERS | PROCESS | RECORDED)


def test_the_files_are_up_to_date(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_boards_are_valid():
    for path, text in files().items():
        board = Dashboard.from_json(json.loads(text))
        assert board.uid == path.stem
        assert board.panels
        numbers = [panel["id"] for panel in json.loads(text)["panels"]]
        assert len(set(numbers)) == len(numbers)


def test_the_names_of_an_expression_are_found():
    expr = "sum(rate(a[1m])) / on () (b or c offset 5m) > bool 3 and histogram_quantile(0.9, d) or (-e)"
    assert names_in(expr) == {"a", "b", "c", "d", "e"}
    assert not OTHERS & vllm_metrics.NOT_SERVED


EXPRESSIONS = {
    f"{board.title}: {row.title}: {panel.title}": [query.expr for query in panel.queries]
    for board in BOARDS
    for row in board.rows
    for panel in row.panels
}
EXPRESSIONS |= {rule.name: [rule.expr] for rule in [*ALERTS, *RECORDS]}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_metrics_of_panels_and_rules_are_declared(name):
    assert EXPRESSIONS[name]
    for expr in EXPRESSIONS[name]:
        found = names_in(expr)
        assert found
        assert found <= known(), f"not declared: {found - known()}"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_a_page(alert):
    text = (ROOT / RUNBOOKS / f"{alert.name}.md").read_text()
    assert text.startswith(f"# {alert.name}\n")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles == ["What it means", "How to look", "What to do"]
    for part in text.split("\n## ")[1:]:
        assert len(part) > 80, part


def test_every_page_has_an_alert():
    pages = {path.stem for path in (ROOT / RUNBOOKS).glob("*.md")} - {"README"}
    assert pages == {alert.name for alert in ALERTS}


@pytest.mark.parametrize(
    "command",
    [
        "promtool check rules rules.yaml",
        "promtool check config prometheus.yaml",
        "amtool check-config alertmanager.yaml",
    ],
)
def test_prometheus_and_alertmanager_accept_their_files(command):
    words = command.split()
    if why := why_not(words[0]):
        pytest.skip(why)
    done = ran(*words, cwd=DEPLOY / "prometheus")
    assert done.returncode == 0, done.stdout + done.stderr


def test_inhibitions_name_alerts():
    text = (DEPLOY / "prometheus" / "alertmanager.yaml").read_text()
    assert set(re.findall(r"alertname = (\w+)", text)) <= {alert.name for alert in ALERTS}


# -- the compose profile


@cache
def compose():
    text = (ROOT / "docker-compose.yml").read_text()
    return yaml.safe_load(re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2", text))


def port_of(service):
    environment = compose()["services"][service].get("environment", {})
    for key in ("BATON_SCHEDULER__METRICS_PORT", "BATON_ROUTER__METRICS_PORT", "BATON_WORKER__METRICS_PORT"):
        if key in environment:
            return int(environment[key])
    return {"prometheus": 9090, "alertmanager": 9093, "grafana": 3000, "tempo": 3200}[service]


def test_only_the_profile_starts_them():
    with_profile = {name for name, one in compose()["services"].items() if one.get("profiles") == ["ops"]}
    assert with_profile == set(OPS)
    for name in OPS:
        for published in compose()["services"][name].get("ports", []):
            assert published.startswith("127.0.0.1:"), f"{name} is open to other machines"
            assert published.endswith(f":{port_of(name)}")
        image = compose()["services"][name]["image"]
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", image), f"{image} is not pinned"


def test_mounted_files_exist_and_are_used():
    for name in OPS:
        one = compose()["services"][name]
        for volume in one.get("volumes", []):
            source, target, *_ = volume.split(":")
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
            else:
                assert source in compose()["volumes"]
            if Path(target).suffix and Path(target).name != "rules.yaml":
                assert any(target in word for word in one["command"]), f"{name} does not read {target}"


def test_prometheus_finds_scheduler_alertmanager_and_rules():
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["honor_labels"]
    (discovered,) = scrape["http_sd_configs"]
    assert discovered["url"] == f"http://scheduler:{port_of('scheduler')}/targets"
    ((manager,),) = [one["static_configs"][0]["targets"] for one in config["alerting"]["alertmanagers"]]
    assert manager == f"alertmanager:{port_of('alertmanager')}"
    volumes = [one.split(":")[:2] for one in compose()["services"]["prometheus"]["volumes"]]
    targets = {Path(target) for _, target in volumes}
    assert {Path("/etc/prometheus") / one for one in config["rule_files"]} <= targets


def test_every_process_of_the_deployment_serves_metrics_to_the_network():
    for name in ("scheduler", "prefill", "decode", "encode", "router"):
        assert port_of(name) >= 1024
    assert port_of("prefill") == port_of("decode") == port_of("encode")


def test_grafana_finds_its_sources_and_boards():
    provisioning = DEPLOY / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "baton.yaml").read_text())["datasources"]
    assert {one["url"] for one in sources} == {
        f"http://prometheus:{port_of('prometheus')}",
        f"http://tempo:{port_of('tempo')}",
    }
    linked = sources[0]["jsonData"]["exemplarTraceIdDestinations"][0]["datasourceUid"]
    assert linked in {one["uid"] for one in sources}
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "baton.yaml").read_text())["providers"]
    grafana = compose()["services"]["grafana"]
    mounted = dict(one.split(":")[1::-1] for one in grafana["volumes"])
    boards = ROOT / mounted[provider["options"]["path"]]
    assert {path.stem for path in boards.glob("*.json")} == {board.name for board in BOARDS}
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (boards / home.name).is_file()


def test_traces_go_from_the_collector_to_tempo():
    collector = yaml.safe_load((DEPLOY / "otel" / "collector.yaml").read_text())
    tempo = yaml.safe_load((DEPLOY / "otel" / "tempo.yaml").read_text())
    (exporter,) = collector["service"]["pipelines"]["traces"]["exporters"]
    host, _, port = collector["exporters"][exporter]["endpoint"].partition(":")
    assert host in compose()["services"]
    endpoint = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert endpoint.endswith(f":{port}")
    assert tempo["server"]["http_listen_port"] == port_of("tempo")
    for part in ("receivers", "processors"):
        assert set(collector["service"]["pipelines"]["traces"][part]) <= set(collector[part])
