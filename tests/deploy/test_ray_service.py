"""deploy/kubernetes/overlays/ray without a cluster, compared with Ray and Baton.

test_kubernetes.py also tests these pods. KubeRay 1.7 adds the command (`ray start` with rayStartParams),
probes, variables and a wait for the head.
"""

import re
from pathlib import Path

import pytest

import baton.ray
from baton.services.config import ENV_PREFIX
from baton.services.ray.config import WORKER_ROLES
from harness.support import ROOT
from tests.deploy import network_policies as rules
from tests.deploy.manifests import NAMESPACE, RayManifests, quantity, render, secrets
from tests.deploy.network_policies import DNS, PROMETHEUS, STRANGERS, Place, Port

HEAD, WORKER = "ray-head", "ray-worker"
# A node's ports: option of `ray start`, default. Serve's port is in its configuration.
PORTS = {
    "gcs-server": ("port", 6379),
    "dashboard": ("dashboard-port", 8265),
    "client": ("ray-client-server-port", 10001),
    "metrics": ("metrics-export-port", 8080),
}
OPERATOR = Place("kuberay", "operators", {"app.kubernetes.io/component": "kuberay-operator"})
# The table in docs/clusters.md: from, to, port, setting. Between nodes all ports are used.
DIALS = [
    ("client", "ray", 8000, "http_options.port"),
    ("kuberay", "ray", 8265, "dashboard-port"),
    ("prometheus", "ray", 8080, "metrics-export-port"),
]
VARIABLES = {"HF_HUB_OFFLINE", "OMP_NUM_THREADS", "RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"}


@pytest.fixture(scope="module")
def manifests():
    return RayManifests(render("ray"))


def test_a_head_and_workers_in_one_namespace(manifests):
    assert [one.name for one in manifests.workloads] == [HEAD, WORKER]
    for one in [manifests.service, *manifests.documents]:
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == NAMESPACE, one["metadata"]
    (budget,) = [one["spec"]["selector"] for one in manifests.of("PodDisruptionBudget")]
    # A budget for the only head would keep its node from being drained.
    assert [rules.matches(budget, one.labels) for one in manifests.workloads] == [False, True]


def test_options_of_serve_and_baton(manifests):
    # Not at the top, because importing Ray takes a second.
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    ServeDeploySchema.model_validate(manifests.serve)
    (application,) = manifests.serve["applications"]
    assert manifests.serve.keys() <= ServeDeploySchema.model_fields.keys()  # Serve accepts others
    assert application.keys() <= ServeApplicationSchema.model_fields.keys()
    builder = f"{baton.ray.__name__}:{baton.ray.build_pd_openai_app.__name__}"
    assert application["import_path"] == builder
    assert manifests.arguments


def test_all_workers_have_room_on_the_nodes(manifests):
    settings, options = manifests.arguments.settings, manifests.arguments.options
    cores = 0.0
    for group in manifests.groups:
        each = float(group["rayStartParams"]["num-cpus"])
        cores += each * group.get("replicas", 1)
        resources = group["template"]["spec"]["containers"][0]["resources"]
        assert each <= quantity(resources["limits"].get("cpu", "0"))
    wanted = {}
    for role in (one for one in WORKER_ROLES if one in options):
        scaling = options[role].get("autoscaling_config", {})
        most = scaling.get("max_replicas", options[role].get("num_replicas", 1))
        for name, amount in settings.bundle(role).items():
            wanted[name] = wanted.get(name, 0.0) + most * amount
    assert wanted.keys() == {"CPU"}
    assert wanted["CPU"] <= cores


def test_options_of_nodes(manifests):
    from ray.scripts.scripts import start

    known = {word.lstrip("-") for one in start.params for word in one.opts}
    serve = {"serve": manifests.serve["http_options"]["port"]}
    for group, one in zip(manifests.groups, manifests.workloads, strict=True):
        given = group["rayStartParams"]
        assert given.keys() <= known, one
        wanted = {name: int(given.get(option, default)) for name, (option, default) in PORTS.items()}
        assert one.ports == serve | (wanted if one.name == HEAD else {"metrics": wanted["metrics"]}), one
        assert one.environment.keys() <= VARIABLES, one
        assert not any(name.startswith(ENV_PREFIX) for name in one.environment), one
        # Engines would have the lowest priority by default.
        assert one.environment["RAY_worker_niceness"] == "0", one
        assert not one.container.get("command"), f"{one}: KubeRay writes the command"
        assert not one.container.get("args"), one
    # KubeRay's default readiness probe needs wget, which is not in the image.
    probe = manifests.workers[0].container["readinessProbe"]["httpGet"]
    assert probe == {"path": "/-/healthz", "port": "serve"}
    pin = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin
    assert manifests.cluster["rayVersion"] == pin[1]
    assert manifests.cluster["authOptions"] == {"mode": "token"}  # anybody could use Ray otherwise


def test_keys_are_mounted_and_the_ca_is_at_home(manifests):
    path = manifests.serve["applications"][0]["args"]["router"]["api_key"]
    for one in manifests.workloads:  # any node may have a router
        assert one.secret_at(path) in secrets(), one
    assert Path(manifests.arguments.settings.security.ca).is_relative_to("~")


def network(manifests):
    own, others = [one.place for one in manifests.workloads], [DNS, PROMETHEUS, OPERATOR, *STRANGERS]
    of = {"client": [*own, *others], "kuberay": [OPERATOR], "prometheus": [PROMETHEUS]}
    needed = rules.dns(own) | {
        (source.name, target.name, Port(number))
        for kind, _, number, _ in DIALS
        for source in of[kind]
        for target in own
        if (kind, target.name) != ("kuberay", WORKER)
    }
    policies = manifests.of("NetworkPolicy")
    numbers = {*rules.edges(policies), *(port.number for _, _, port in needed), *rules.UNUSED_PORTS}
    needed |= {
        (one.name, other.name, Port(number, protocol))
        for one in own
        for other in own
        for number in numbers
        for protocol in ("UDP", "TCP")
    }
    return rules.differences(policies, own, others, needed)


def test_policies_allow_exactly_the_table(manifests):
    assert not network(manifests)
