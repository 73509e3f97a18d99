"""Baton's manifests for Kubernetes, rendered, and what a cluster would not find wrong but Baton does.

`problems` checks them against Kubernetes' own schemas, and then against Baton: its settings, its command
line, what its processes listen on, serve and take to drain, who dials whom. It needs no cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate
from typer.testing import CliRunner

from baton import addresses
from baton.protos import worker_pb2
from baton.security.authority import KEPT, KEY, TOKENS
from baton.security.authority import ROOT as CA_CERTIFICATE
from baton.security.errors import NotSecured
from baton.services import identities
from baton.services.cli.main import app
from baton.services.config import ENV_PREFIX
from baton.services.errors import ConfigError
from baton.services.router.http.authentication import OPEN
from harness import dockerfile
from harness.support import ROOT
from tests.deploy.dialling import network
from tests.deploy.manifests import (
    FIELDS,
    NAMESPACE,
    PAGE,
    Manifests,
    Workload,
    listens,
    metrics_port,
    ports,
    quantity,
    secrets,
)
from tests.deploy.network_policies import Doc, matches

VERSIONS = ("1.30", "1.37")  # the oldest that docs/clusters.md promises, and the newest known
# Variables that are not Baton's: those that it, or a library of its, is known to read.
OTHER_VARIABLES = {"HF_HUB_OFFLINE", "OMP_NUM_THREADS"}
KUBELET_GRACE_S = 15.0  # for what comes after a drain: last replies, the engine's end


def problems(documents: list[Doc]) -> list[str]:
    """Return what is wrong, a line each. A later group is looked at when all before it are without fault."""
    manifests = Manifests(documents)
    for group in GROUPS:
        if found := [f"{rule.__name__.lstrip('_')}: {text}" for rule in group for text in rule(manifests)]:
            return found
    return []


Rule = Callable[[Manifests], Iterator[str]]


# What Kubernetes itself would say.


@cache
def _schema_problem(text: str) -> str:
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(json.loads(text), version, strict=True)
        except kubernetes_validate.ValidationError as error:
            return f"{version}: {error.message}"
    return ""


def schema(manifests: Manifests) -> Iterator[str]:
    for one in manifests.documents:
        if problem := _schema_problem(json.dumps(one, sort_keys=True)):
            yield f"{one['kind']} {one['metadata'].get('name')}: {problem}"


# What is named is there.


def _names(manifests: Manifests) -> Iterator[str]:
    seen = set()
    for one in manifests.documents:
        name = (one["kind"], one["metadata"]["name"])
        if name in seen:
            yield f"{name} is there twice"
        seen.add(name)
        if one["kind"] != "Namespace" and one["metadata"].get("namespace") != NAMESPACE:
            yield f"{name} is not in the namespace {NAMESPACE}"
    namespace = manifests.named("Namespace", NAMESPACE) or {}
    labels = namespace.get("metadata", {}).get("labels", {})
    if labels.get("pod-security.kubernetes.io/enforce") != "restricted":
        yield f"the namespace {NAMESPACE} does not enforce the restricted standard"
    if sorted(one.name for one in manifests.workloads) != [
        "ca",
        "decode",
        "prefill",
        "redis",
        "router",
        "scheduler",
    ]:
        yield "not exactly a CA, a scheduler, Redis, routers, prefill and decode workers"


def references(manifests: Manifests) -> Iterator[str]:
    for one in manifests.workloads:
        for source in one.container.get("envFrom", []):
            name = source.get("configMapRef", {}).get("name", "")
            if not manifests.named("ConfigMap", name):
                yield f"{one}: there is no ConfigMap {name!r}"
        volumes = {volume["name"] for volume in one.pod.get("volumes", [])}
        containers = [one.container, *one.pod.get("initContainers", [])]
        mounted = {mount["name"] for each in containers for mount in each.get("volumeMounts", [])}
        for name in volumes ^ mounted:
            yield f"{one}: volume {name!r} is not both declared and mounted"
        for volume in one.pod.get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and not manifests.named("PersistentVolumeClaim", claim):
                yield f"{one}: there is no claim {claim!r}"
            secret = volume.get("secret", {}).get("secretName")
            if secret and secret not in {name for name, _ in secrets()}:
                yield f"{one}: {PAGE.name} does not say how to make the Secret {secret!r}"


def _selectors(manifests: Manifests) -> Iterator[str]:
    for one in manifests.workloads:
        if manifests.selected(one.spec["selector"]) != [one.name]:
            yield f"{one} selects the pods of {manifests.selected(one.spec['selector'])}"
    for service in manifests.of("Service"):
        name, spec = service["metadata"]["name"], service["spec"]
        chosen = manifests.selected({"matchLabels": spec.get("selector", {})})
        if chosen != [name]:
            yield f"Service {name} selects the pods of {chosen}"
            continue
        ports = manifests.workload(name).ports
        for port in spec["ports"]:
            target = port.get("targetPort", port["port"])
            if target not in ports and target not in ports.values():
                yield f"Service {name}: its pods have no port {target!r}"


def _budgets(manifests: Manifests) -> Iterator[str]:
    for one in manifests.ours:
        budgets = [
            budget["spec"]
            for budget in manifests.of("PodDisruptionBudget")
            if matches(budget["spec"]["selector"], one.labels)
        ]
        if len(budgets) != 1:
            yield f"{one} has {len(budgets)} disruption budgets"
            continue
        (budget,) = budgets
        if manifests.selected(budget["selector"]) != [one.name]:
            yield f"the disruption budget of {one} is not its own"
        if budget.get("maxUnavailable", one.spec["replicas"] - budget.get("minAvailable", 0)) < 1:
            yield f"the disruption budget of {one} lets no node be drained"
    for name in ("router", "scheduler"):
        if manifests.workload(name).spec["replicas"] < 2:
            yield f"one {name} alone is missed when its node goes"


# Settings, and what follows from them.


def _settings(manifests: Manifests) -> Iterator[str]:
    for one in manifests.ours:
        for name in one.environment:
            if not name.startswith(ENV_PREFIX) and name not in OTHER_VARIABLES:
                yield f"{one}: nobody reads the variable {name}"
        try:
            one.settings.scheduler.check_shared()
            identities.check(one.settings)
        except (ConfigError, NotSecured) as error:
            yield f"{one}: {error}"
        else:
            if not one.settings.security.tls:
                yield f"{one} speaks plain text"


def _commands(manifests: Manifests) -> Iterator[str]:
    for one in manifests.ours:
        program, *words = [*one.container.get("command", []), *one.container.get("args", [])] or [""]
        if program != "baton":  # the first process is the one that gets SIGTERM
            yield f"{one} does not run baton itself"
            continue
        if problem := _command_problem(tuple(words)):
            yield f"{one}: {problem}"
        elif words != _COMMANDS.get(one.kind, [one.name]):
            yield f"{one} runs {words}: its settings belong into a ConfigMap"


# But for these, a workload's name is its command.
_COMMANDS = {"ca": ["ca", "serve", "--listen", "0.0.0.0:7443"]}


@cache
def _command_problem(words: tuple[str, ...]) -> str:
    done = CliRunner().invoke(app, [*words, "--help"])
    return "" if done.exit_code == 0 else " ".join(done.output.split())


def _agreement(manifests: Manifests) -> Iterator[str]:
    """Sections that processes must not read differently."""
    own = {
        "scheduler": {"address", "metrics_port", "store_password_file"},
        "engine": set[str](),
        "handoff": set[str](),
    }
    for section, except_for in own.items():
        among = (
            manifests.ours
            if section == "scheduler"
            else [one for one in manifests.ours if one.kind != "scheduler"]
        )
        if section == "handoff":
            among = [one for one in among if one.kind == "worker"]
        read = {one.name: getattr(one.settings, section).model_dump(exclude=except_for) for one in among}
        first, *others = read
        for name in others:
            if different := [key for key in read[first] if read[first][key] != read[name][key]]:
                yield f"{first} and {name} have different {section} settings: {different}"


def _ports(manifests: Manifests) -> Iterator[str]:
    for one in manifests.ours:
        wanted = set(ports(one))
        if set(one.ports.values()) != wanted:
            yield f"{one} lists the ports {sorted(one.ports.values())}, and listens on {sorted(wanted)}"
        for place in listens(one):
            if not addresses.is_wildcard(addresses.split(place)[0]):
                yield f"{one} listens on {place}, where others do not reach it"


def _metrics(manifests: Manifests) -> Iterator[str]:
    """Each tells the scheduler where its metrics are, which lists them for Prometheus."""
    for one in manifests.ours:
        if one.kind != "ca" and not metrics_port(one):
            yield f"{one} serves its metrics on loopback: {one.kind}.metrics_port is not set"


def _addresses(manifests: Manifests) -> Iterator[str]:
    """Yield what is wrong with the addresses that are dialled by a name."""
    schedulers = manifests.workload("scheduler")
    service = manifests.named("Service", schedulers.spec.get("serviceName", ""))
    (port, *_) = ports(schedulers)
    if service is None or service["spec"].get("clusterIP") != "None":
        yield f"{schedulers}: no headless Service gives its pods names"
        return
    if not service["spec"].get("publishNotReadyAddresses"):
        yield "Service scheduler hides a scheduler that lacks Redis, which is still better than none"
    name = f"{schedulers.name}-{{}}.{service['metadata']['name']}:{port}"
    wanted = ",".join(name.format(number) for number in range(schedulers.spec["replicas"]))
    for one in manifests.ours:
        if one is not schedulers and one.settings.scheduler.address != wanted:
            yield f"{one} looks for schedulers at {one.settings.scheduler.address}; they are {wanted}"
        store = urlsplit(one.settings.scheduler.store)
        redis = manifests.named("Service", store.hostname or "")
        if not redis or store.port not in [each["port"] for each in redis["spec"]["ports"]]:
            yield f"{one}: there is no store at {store.hostname}:{store.port}"
        join = one.settings.security.join
        if one.kind != "ca" and join not in _named_ports(manifests, "ca"):
            yield f"{one} joins at {join!r}; the CA is at {_named_ports(manifests, 'ca')}"
    redis_port = manifests.workload("redis").ports.get("redis")
    if f"\nport {redis_port}\n" not in " ".join(manifests.workload("redis").container["command"]):
        yield f"Redis does not listen on {redis_port}"
    for one in manifests.workers:
        if one.settings.worker.advertise != FIELDS["status.podIP"]:
            yield f"{one} does not advertise its pod's address"
        if one.settings.worker.worker_id != FIELDS["metadata.name"]:
            yield f"{one} is not named for its pod"


def _named_ports(manifests: Manifests, service: str) -> list[str]:
    """Return the places at which a Service is found."""
    found = manifests.named("Service", service)
    return [addresses.join(service, one["port"]) for one in found["spec"]["ports"]] if found else []


def _probes(manifests: Manifests) -> Iterator[str]:
    for one in manifests.workloads:
        probes = {kind: one.container.get(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")}
        for kind in ("liveness", "readiness"):
            if not probes[kind]:
                yield f"{one} has no {kind} probe"
        if one.kind in ("worker", "router") and not probes["startup"]:
            yield f"{one} has no startup probe: it would be killed while it loads"
        for kind, probe in probes.items():
            if probe and one.is_ours and (problem := _probe_problem(one, kind, probe)):
                yield f"{one}: its {kind} probe {problem}"


def _probe_problem(one: Workload, kind: str, probe: Doc) -> str:
    if one.kind == "router":
        get = probe.get("httpGet")
        if not get or one.ports.get(get["port"], get["port"]) != one.settings.router.port:
            return "does not ask the port of HTTP"
        if get["path"] not in OPEN:
            return f"asks {get['path']}, which needs a key"
        health = get["path"] == "/health"  # 503 while no worker could take a request
        return "" if health is (kind == "readiness") else f"asks {get['path']}"
    if one.kind == "ca":
        get = probe.get("httpGet", {})
        asked = (get.get("scheme"), one.ports.get(get.get("port")), get.get("path"))
        return "" if asked == ("HTTPS", ports(one)[0], "/ca") else "does not ask the CA for its certificate"
    served = {""} if one.kind == "scheduler" else {"", _WORKER_SERVICE}
    program, script, place, *named = [*probe.get("exec", {}).get("command", []), "", "", ""][:4]
    if (program, script) != ("python", f"{dockerfile.workdir()}/{_CHECK.relative_to(ROOT)}"):
        return "is not the command that shows a certificate"
    if not one.settings.security.folder:
        return "finds no certificate to show"
    if place != addresses.join("127.0.0.1", ports(one)[0]):
        return "does not ask the port of gRPC"
    service = "".join(named)
    if service not in served:
        return f"asks for the service {service!r}, which is not served"
    if probe.get("timeoutSeconds", 1) <= _CHECK_S:
        return "is over before its command"
    patience_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
    if kind == "liveness" and one.kind == "worker" and patience_s <= one.settings.worker.drain_timeout_s:
        return "kills a worker that drains"
    return ""


_CHECK = ROOT / "deploy" / "healthcheck.py"
_CHECK_S = 3.0  # it waits for 2 s, and has to start
_WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


def _drains(manifests: Manifests) -> Iterator[str]:
    for one in manifests.ours:
        settings = one.settings
        drain_s = {"router": settings.router.drain_timeout_s, "worker": settings.worker.drain_timeout_s}
        pause_s = one.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        grace_s = one.pod.get("terminationGracePeriodSeconds", 30)
        needed_s = pause_s + drain_s.get(one.kind, 0) + KUBELET_GRACE_S
        if grace_s < needed_s:
            yield f"{one} is killed after {grace_s} s; it may drain for {needed_s:g} s"
        if one.kind == "router" and pause_s < 3:
            yield f"{one} ends before its Service knows: new connections are refused"


def _files(manifests: Manifests) -> Iterator[str]:
    for one in manifests.ours:
        settings = one.settings
        wanted = {
            "router": ("router.api_key_file", settings.router.api_key_file),
            "scheduler": ("scheduler.store_password_file", settings.scheduler.store_password_file),
        }
        if one.kind in wanted:
            key, path = wanted[one.kind]
            _, volume = one.mounts.get(str(Path(path).parent), ({}, {}))
            if (volume.get("secret", {}).get("secretName"), Path(path).name) not in secrets():
                yield f"{one}: {key} is {path!r}, where no key of a Secret is mounted"
        if one.kind in ("worker", "router"):
            yield from _model(one)
        yield from _certificates(one)
    redis = manifests.workload("redis")
    read = re.findall(r"/run/secrets/[\w/.-]+", json.dumps(redis.container["command"]))
    for path in {*read, *([] if read else ["no password"])}:
        _, volume = redis.mounts.get(str(Path(path).parent), ({}, {}))
        if (volume.get("secret", {}).get("secretName"), Path(path).name) not in secrets():
            yield f"{redis} reads {path!r}, where no key of a Secret is mounted"


def _certificates(one: Workload) -> Iterator[str]:
    """Each joins with a token of its own role; the CA has its key, in a folder that it may write to."""
    own = one.settings.security
    if one.kind != "ca":
        path = Path(own.token_file)
        _, volume = one.mounts.get(str(path.parent), ({}, {}))
        found = (volume.get("secret", {}).get("secretName"), path.name)
        if found not in secrets() or found[0] != f"{one.kind}-token":
            yield f"{one}: security.token_file is {own.token_file!r}, where no token of its role is mounted"
        if not Path(own.folder).is_relative_to(f"/home/{dockerfile.user()}"):
            yield f"{one}: security.folder is {own.folder!r}, where it may not write"
        return
    _, volume = one.mounts.get(own.ca, ({}, {}))
    if volume.get("emptyDir", {}).get("medium") != "Memory":
        yield f"{one}: security.ca is {own.ca!r}, which is no folder in memory"
    mount, kept = one.mounts.get(f"{own.ca}/{KEPT}", ({}, {}))
    if "persistentVolumeClaim" not in kept or mount.get("readOnly"):
        yield f"{one}: what is revoked is forgotten with its pod: {own.ca}/{KEPT} is on no volume"
    elif one.spec.get("strategy", {}).get("type") != "Recreate":
        yield f"{one}: a new pod on another node waits for ever for the volume of the old one"
    for first in one.pod["initContainers"]:
        mounts = {mount["name"]: mount["mountPath"] for mount in first.get("volumeMounts", [])}
        secret = next((each["name"] for each in one.pod["volumes"] if "secret" in each), "")
        copy = f"install -m 600 {mounts.get(secret)}/* {mounts.get(volume.get('name'))}"
        if copy in first["command"]:
            break
    else:
        yield f"{one}: nobody copies its key to {own.ca}"
    wanted = {("ca", KEY), ("ca", CA_CERTIFICATE), ("ca", TOKENS)}
    if lacks := wanted - secrets():
        yield f"{one}: {PAGE.name} does not put {sorted(lacks)} into its Secret"


def _model(one: Workload) -> Iterator[str]:
    model = Path(one.settings.engine.model)
    inside = dockerfile.workdir()
    if model.is_relative_to(inside):
        if not (ROOT / model.relative_to(inside) / "config.json").is_file():
            yield f"{one}: there is no model {model} in the image"
        return
    claims = [path for path, (_, volume) in one.mounts.items() if "persistentVolumeClaim" in volume]
    if not any(model.is_relative_to(path) for path in claims):
        yield f"{one}: its model {model} is on no volume"


def volumes(manifests: Manifests) -> Iterator[str]:
    home = f"/home/{dockerfile.user()}"
    for one in manifests.workloads:
        for path, (mount, volume) in one.mounts.items():
            claimed = path == f"{one.settings.security.ca}/{KEPT}" if one.kind == "ca" else False
            if "emptyDir" not in volume and not mount.get("readOnly") and not claimed:
                yield f"{one} may write to {path}"
            if "secret" in volume and volume["secret"].get("defaultMode", 0o644) & 0o007:
                yield f"{one}: everybody in the pod may read {path}"
            if "emptyDir" in volume and not volume["emptyDir"].get("sizeLimit"):
                yield f"{one}: {path} may fill its node"
        if one.is_ours:
            for path in {home, "/tmp"} - set(one.mounts):
                yield f"{one} cannot write to {path}"
            copies = [each for each in one.pod.get("initContainers", []) if f"{home}/." in each["command"]]
            into = [mount for each in copies for mount in each["volumeMounts"]]
            if [(each["name"], each["mountPath"]) for each in into] != [
                (one.mounts.get(home, ({}, {}))[0].get("name"), each["command"][-1]) for each in copies
            ] or not copies:
                yield f"{one} does not find in {home} what the image prepared there"
    for one in manifests.workers:
        _, volume = one.mounts.get("/dev/shm", ({}, {}))
        shm = volume.get("emptyDir", {})
        if shm.get("medium") != "Memory":
            yield f"{one} has no /dev/shm of its own: saved KV finds 64 MiB"
        elif quantity(shm["sizeLimit"]) >= quantity(one.limit("memory")):
            yield f"{one}: /dev/shm counts as memory, and may be as large as its limit"


def security(manifests: Manifests) -> Iterator[str]:
    (line,) = [text for text in dockerfile.texts("RUN") if text.startswith("useradd")]
    uid = re.search(r"--uid (\d+)", line)
    for one in manifests.workloads:
        pod = one.pod.get("securityContext", {})
        if not pod.get("runAsNonRoot") or not pod.get("runAsUser"):
            yield f"{one} may run as root"
        elif one.is_ours and (not uid or pod["runAsUser"] != int(uid[1])):
            yield f"{one} runs as {pod['runAsUser']}, who is nobody in the image"
        if pod.get("fsGroup") != pod.get("runAsGroup"):
            yield f"{one} cannot read its secrets"
        if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{one} has no seccomp profile"
        if one.pod.get("automountServiceAccountToken") is not False:
            yield f"{one} has a token of the cluster's that it does not need"
        if one.pod.get("enableServiceLinks") is not False:
            yield f"{one} gets variables of Services: Baton refuses those that begin with {ENV_PREFIX}"
        for each in [one.container, *one.pod.get("initContainers", [])]:
            own = each.get("securityContext", {})
            if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities") != {
                "drop": ["ALL"]
            }:
                yield f"{one}, {each['name']}: it may get more rights"
            if own.get("readOnlyRootFilesystem") is not True:
                yield f"{one}, {each['name']}: it may change its image's files"


def resources(manifests: Manifests) -> Iterator[str]:
    for one in manifests.workloads:
        for each in [one.container, *one.pod.get("initContainers", [])]:
            given = each.get("resources", {})
            for resource in ("cpu", "memory"):
                if resource not in given.get("requests", {}):
                    yield f"{one}, {each['name']}: it requests no {resource}"
            if "memory" not in given.get("limits", {}):
                yield f"{one}, {each['name']}: its memory has no limit"
            elif quantity(given.get("requests", {}).get("memory", "0")) > quantity(given["limits"]["memory"]):
                yield f"{one}, {each['name']}: it requests more memory than it may have"
    images = {each["image"] for one in manifests.ours for each in [one.container, *one.pod["initContainers"]]}
    if len(images) != 1:
        yield f"there are several images of Baton: {sorted(images)}"
    gpus = {one.name: one.limit("nvidia.com/gpu") for one in manifests.ours if one.limit("nvidia.com/gpu")}
    if gpus or any(image.endswith("gpu") for image in images):
        for one in manifests.workers:
            ranks = str(one.settings.engine.tensor_parallel_size)
            if gpus.pop(one.name, "0") != ranks:
                yield f"{one} has {ranks} tensor-parallel ranks, and not as many GPUs"
        if gpus:
            yield f"{sorted(gpus)} need no GPU"


GROUPS: list[list[Rule]] = [
    [schema],
    [_names],
    [references, _selectors, _budgets],
    [_settings, _commands],
    [
        *(_agreement, _ports, _metrics, _addresses, _probes, _drains, _files),
        *(volumes, security, resources, network),
    ],
]
