"""The overlay for KubeRay, rendered: what neither Kubernetes nor KubeRay's operator would find wrong.

Its pods are checked as those of the other overlays are; KubeRay adds the command, probes and variables
(KubeRay 1.7: `ray start` with rayStartParams, RAY_AUTH_*, an init container that waits for the head).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

import baton.ray
from baton.services.config import ENV_PREFIX
from baton.services.errors import ConfigError
from baton.services.ray.config import WORKER_ROLES
from baton.services.ray.serve_args import ServeArgs, read
from harness import dockerfile
from harness.support import ROOT
from tests.deploy.dialling import ANY, DNS, PROMETHEUS, STRANGERS, differences
from tests.deploy.kubernetes import OTHER_VARIABLES, Rule, references, resources, schema, security, volumes
from tests.deploy.manifests import NAMESPACE, Manifests, Workload, quantity, secrets
from tests.deploy.network_policies import Doc, Place, Port, edges, matches

HEAD, WORKER = "ray-head", "ray-worker"
# Of each node, and the option of `ray start` that changes it; Serve's own is in its configuration.
PORTS = {"gcs-server": ("port", 6379), "dashboard": ("dashboard-port", 8265)}
PORTS |= {"client": ("ray-client-server-port", 10001), "metrics": ("metrics-export-port", 8080)}
OPERATOR = Place("kuberay", "operators", {"app.kubernetes.io/component": "kuberay-operator"})
# As in docs/clusters.md: from, to, port, its setting. Among themselves nodes use every port.
NEEDED = [
    ("client", "ray", 8000, "http_options.port"),
    ("kuberay", "ray", 8265, "dashboard-port"),
    ("prometheus", "ray", 8080, "metrics-export-port"),
]
VARIABLES = OTHER_VARIABLES | {"RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"}


class RayManifests(Manifests):
    """The documents, with a workload for each group of Ray's nodes."""

    def __init__(self, documents: list[Doc]) -> None:
        (self.service,) = [one for one in documents if one["kind"] == "RayService"]
        cluster = self.service["spec"]["rayClusterConfig"]
        self.groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        templates = [
            {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": one.get("groupName", "head"), "namespace": NAMESPACE},
                "template": one["template"],
            }
            for one in self.groups
        ]
        super().__init__([*(one for one in documents if one is not self.service), *templates])
        self.workloads = [self._workload(one) for one in self.groups]

    def _workload(self, group: Doc) -> Workload:
        name = group["template"]["spec"]["containers"][0]["name"]
        spec = {"template": group["template"], "replicas": group.get("replicas", 1)}
        return Workload({"kind": "RayService", "metadata": {"name": name}, "spec": spec}, self)

    @property
    def workers(self) -> list[Workload]:
        return [one for one in self.workloads if one.name == WORKER]

    @property
    def serve(self) -> Doc:
        found: Doc = yaml.safe_load(self.service["spec"]["serveConfigV2"])
        return found

    @property
    def arguments(self) -> ServeArgs:
        """Read the arguments as build_pd_openai_app does, with the checkout's files. Raises ConfigError."""
        given = in_checkout(self.serve["applications"][0]["args"])
        given.get("router", {}).pop("api_key_file", None)  # which only the pods have
        return read(given)

    @property
    def key_file(self) -> str:
        found: str = self.serve["applications"][0]["args"].get("router", {}).get("api_key_file", "")
        return found


def in_checkout(given: Any) -> Any:
    """Return the arguments with paths of the image replaced by those of the checkout."""
    text = yaml.safe_dump(given)
    return yaml.safe_load(text.replace(f"{dockerfile.workdir()}/", f"{ROOT}/"))


def problems(documents: list[Doc]) -> list[str]:
    """Return what is wrong, a line each. A later group is looked at when all before it are without fault."""
    manifests = RayManifests(copy.deepcopy(documents))
    for group in GROUPS:
        if found := [f"{rule.__name__.lstrip('_')}: {text}" for rule in group for text in rule(manifests)]:
            return found
    return []


def _names(manifests: RayManifests) -> Iterator[str]:
    if [one.name for one in manifests.workloads] != [HEAD, WORKER]:
        yield f"not exactly {HEAD} and {WORKER}"
    for one in [manifests.service, *manifests.documents]:
        if one["kind"] != "Namespace" and one["metadata"].get("namespace") != NAMESPACE:
            yield f"{one['kind']} {one['metadata']['name']} is not in the namespace {NAMESPACE}"
    budgets = [one["spec"]["selector"] for one in manifests.of("PodDisruptionBudget")]
    for one in manifests.workloads:
        if [matches(each, one.labels) for each in budgets].count(True) != (one.name == WORKER):
            yield f"{one.name}: a budget for {WORKER}, and none for the one head, which could never be moved"


def _application(manifests: RayManifests) -> Iterator[str]:
    """Check the part that Serve reads, and then the part that Baton reads."""
    # Here: Ray takes a second, and each process of pytest imports this file.
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(manifests.serve)
    except ValidationError as error:
        yield from (f"serveConfigV2: {one['loc']}: {one['msg']}" for one in error.errors())
        return
    (one,) = manifests.serve["applications"]
    for given, model in ((manifests.serve, ServeDeploySchema), (one, ServeApplicationSchema)):
        for key in given.keys() - model.model_fields.keys():  # Serve would not mind
            yield f"serveConfigV2: Serve knows no {key!r}"
    if one["import_path"] != f"{baton.ray.__name__}:{baton.ray.build_pd_openai_app.__name__}":
        yield f"import_path {one['import_path']!r} is not Baton's"
    try:
        _ = manifests.arguments
    except ConfigError as error:
        yield f"args: {error}"


def _room(manifests: RayManifests) -> Iterator[str]:
    """The first workers of both roles have room on Ray's nodes; scaled up to the most, too."""
    settings, options = manifests.arguments.settings, manifests.arguments.options
    there = {"CPU": 0.0}
    for group in manifests.groups:
        there["CPU"] += float(group["rayStartParams"]["num-cpus"]) * group.get("replicas", 1)
        cpu = group["template"]["spec"]["containers"][0]["resources"]["limits"].get("cpu", "0")
        if float(group["rayStartParams"]["num-cpus"]) > quantity(cpu):
            yield f"Ray would give out more cores than the pod has ({cpu})"
    wanted: dict[str, float] = {}
    for role in WORKER_ROLES:
        scaling = options[role].get("autoscaling_config", {})
        most = scaling.get("max_replicas", options[role].get("num_replicas", 1))
        for name, amount in settings.bundle(role).items():
            wanted[name] = wanted.get(name, 0.0) + most * amount
    for name, amount in wanted.items():
        if amount > there.get(name, 0.0):
            yield f"workers want {amount:g} {name}, and the nodes have {there.get(name, 0.0):g}"


def _nodes(manifests: RayManifests) -> Iterator[str]:
    """Check the part that `ray start` and the processes on a node read."""
    from ray.scripts.scripts import start

    known = {word.lstrip("-") for one in start.params for word in one.opts}
    serving = manifests.serve["http_options"]["port"]
    for group, one in zip(manifests.groups, manifests.workloads, strict=True):
        given = group["rayStartParams"]
        for name in given.keys() - known:
            yield f"{one.name}: `ray start` has no option --{name}"
        wanted = {name: int(given.get(option, default)) for name, (option, default) in PORTS.items()}
        if one.name == WORKER:
            wanted = {"metrics": wanted["metrics"]}
        if one.ports != wanted | {"serve": serving}:
            yield f"{one.name} lists the ports {one.ports}, and has {wanted | {'serve': serving}}"
        for name in one.environment:
            if name.startswith(ENV_PREFIX) or name not in VARIABLES:
                yield f"{one.name}: nobody reads the variable {name}, or not from there"
        if one.environment.get("RAY_worker_niceness") != "0":
            yield f"{one.name}: engines give way to everything else on their machine"
        if one.container.get("command") or one.container.get("args"):
            yield f"{one.name}: KubeRay writes the command"
    probe = manifests.workers[0].container.get("readinessProbe", {}).get("httpGet")
    if probe != {"path": "/-/healthz", "port": "serve"}:
        yield f"{WORKER}: KubeRay's own readiness probe needs wget, which the image lacks"
    cluster = manifests.service["spec"]["rayClusterConfig"]
    pins = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if not pins or cluster.get("rayVersion") != pins[1]:
        yield f"rayVersion is {cluster.get('rayVersion')}, and the image has {pins and pins[1]}"
    if cluster.get("authOptions") != {"mode": "token"}:
        yield "who reaches Ray may use it: authOptions"


def _files(manifests: RayManifests) -> Iterator[str]:
    settings, path = manifests.arguments.settings, Path(manifests.key_file)
    for one in manifests.workloads:  # a router may run on each
        _, volume = one.mounts.get(str(path.parent), ({}, {}))
        if (volume.get("secret", {}).get("secretName"), path.name) not in secrets():
            yield f"{one.name}: router.api_key_file is {str(path)!r}, where no key of a Secret is mounted"
        if not Path(settings.security.ca).is_relative_to("~"):
            yield f"{one.name}: security.ca is {settings.security.ca!r}, where it may not write"


def _network(manifests: RayManifests) -> Iterator[str]:
    own, others = [one.place for one in manifests.workloads], [DNS, PROMETHEUS, OPERATOR, *STRANGERS]
    policies = manifests.of("NetworkPolicy")
    of = {"client": [*own, *others], "kuberay": [OPERATOR], "prometheus": [PROMETHEUS]}
    needed = {
        (source.name, target.name, Port(number))
        for kind, _, number, _ in NEEDED
        for source in of[kind]
        for target in own
        if (kind, target.name) != ("kuberay", WORKER)
    }
    needed |= {(one.name, DNS.name, Port(53, protocol)) for one in own for protocol in ("UDP", "TCP")}
    every = {*edges(policies), *(port.number for _, _, port in needed), *ANY}
    needed |= {
        (one.name, other.name, Port(number, protocol))
        for one in own
        for other in own
        for number in every
        for protocol in ("UDP", "TCP")
    }
    yield from differences(policies, own, others, needed)


GROUPS: list[list[Rule]] = [
    [schema],
    [_names, _application],  # type: ignore[list-item]
    [references, _room, _nodes],  # type: ignore[list-item]
    [_files, volumes, security, resources, _network],  # type: ignore[list-item]
]
