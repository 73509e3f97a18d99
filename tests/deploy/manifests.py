import os
import re
import sys
from functools import cache, cached_property
from pathlib import Path
from unittest.mock import patch

import yaml

from baton import addresses
from baton.handoff.ports import of_worker
from baton.services.config import load
from baton.services.ray.serve_args import read
from harness import dockerfile
from harness.support import ROOT, ran
from tests.deploy.leader_worker_set import LABELS, as_workload
from tests.deploy.network_policies import Place, matches

FOLDER = ROOT / "deploy" / "kubernetes"
PAGE = ROOT / "docs" / "clusters.md"
NAMESPACE = "baton"
WORKERS = ("prefill", "decode", "encode")
FIELDS = {  # values of the downward API
    "status.podIP": "10.20.30.40",
    "metadata.name": "a-pod",
    f"metadata.labels['{LABELS}/group-key']": "0f3a",
    f"metadata.labels['{LABELS}/worker-index']": "1",
}
UNITS = {"": 1, "m": 0.001, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def render(overlay):
    done = ran(Path(sys.prefix) / "bin" / "kubectl", "kustomize", FOLDER / "overlays" / overlay)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


class Workload:
    """A Deployment, a StatefulSet, a LeaderWorkerSet or a group of Ray's nodes."""

    def __init__(self, document, manifests):
        self.document = document
        self.name = document["metadata"]["name"]
        self.spec = document["spec"]
        self.labels = self.spec["template"]["metadata"].get("labels", {})
        self.pod = self.spec["template"]["spec"]
        self.container = self.pod["containers"][0]
        self.first = self.pod.get("initContainers", [])
        self.containers = [self.container, *self.first]
        self.is_ours = self.container["image"].partition(":")[0] == "baton"
        self.kind = "worker" if self.name in WORKERS else self.name
        self._manifests = manifests

    def __repr__(self):
        return f"{self.document['kind']} {self.name}"

    @property
    def ports(self):
        return {one["name"]: one["containerPort"] for one in self.container.get("ports", [])}

    @property
    def mounts(self):
        """The mount and the volume at each path."""
        volumes = {one["name"]: one for one in self.pod.get("volumes", [])}
        mounts = self.container.get("volumeMounts", [])
        return {one["mountPath"]: (one, volumes.get(one["name"], {})) for one in mounts}

    def secret_at(self, setting):
        """Return the secret and its key at a path, or that a setting names as file:PATH."""
        path = getattr(setting, "get_secret_value", lambda: setting)().removeprefix("file:")
        _, volume = self.mounts.get(str(Path(path).parent), ({}, {}))
        return volume.get("secret", {}).get("secretName", ""), Path(path).name

    @cached_property
    def environment(self):
        found = {}
        for one in self.container.get("envFrom", []):
            found |= self._manifests.named("ConfigMap", one["configMapRef"]["name"])["data"]
        for one in self.container.get("env", []):
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                found[one["name"]] = FIELDS.get(source["fieldRef"]["fieldPath"], "")
            elif "resourceFieldRef" in source:
                resource = source["resourceFieldRef"]["resource"].removeprefix("limits.")
                found[one["name"]] = self.limit(resource)
            else:
                given = one.get("value", "")
                found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], given)
        return found

    def limit(self, resource):
        return str(self.container.get("resources", {}).get("limits", {}).get(resource, ""))

    @cached_property
    def settings(self):
        with patch.dict(os.environ, self.environment, clear=True):
            return load()

    @property
    def listens(self):
        """The addresses that it listens on, beginning with the one for requests."""
        settings, words = self.settings, self.container.get("command", [])
        if self.kind == "ca":
            return [words[words.index("--listen") + 1]]
        if self.kind == "router":
            return [addresses.join(settings.router.host, settings.router.port)]
        if self.kind == "scheduler":
            return [settings.scheduler.address]
        handoff = settings.handoff
        pulled = [addresses.join(handoff.host, handoff.port)] if handoff.host else []
        return [settings.worker.listen, *pulled]

    @property
    def handoff_ports(self):
        return list(of_worker(self.settings.handoff.port, self.settings.engine.tensor_parallel_size))

    @property
    def metrics_port(self):
        """The port of its metrics. The CA has none."""
        return 0 if self.kind == "ca" else int(getattr(self.settings, self.kind).metrics_port)

    def ports_of(self, setting):
        if self.kind == "redis":
            return list(self.ports.values())
        if self.kind == "ca":
            return [addresses.split(self.listens[0])[1]]
        if setting == "handoff.listen":
            return self.handoff_ports
        section, _, key = setting.partition(".")
        value = getattr(getattr(self.settings, section), key)
        return [value if isinstance(value, int) else addresses.split(value)[1]]

    @property
    def place(self):
        return Place(self.name, NAMESPACE, self.labels, self.ports)


class Manifests:
    def __init__(self, documents):
        self.documents = documents
        self.workloads = [Workload(one, self) for one in self.of("Deployment", "StatefulSet")]
        self.workloads += [Workload(as_workload(one), self) for one in self.of("LeaderWorkerSet")]

    def of(self, *kinds):
        return [one for one in self.documents if one["kind"] in kinds]

    def named(self, kind, name):
        found = [one for one in self.of(kind) if one["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} documents are {kind} {name}"
        return found[0]

    @property
    def ours(self):
        return [one for one in self.workloads if one.is_ours]

    @property
    def workers(self):
        return [one for one in self.ours if one.kind == "worker"]

    def workload(self, name):
        return next(one for one in self.workloads if one.name == name)

    def selected(self, selector):
        return [one.name for one in self.workloads if matches(selector, one.labels)]


class RayManifests(Manifests):
    """The documents of the overlay ray, with a workload for each group of Ray's nodes."""

    def __init__(self, documents):
        (self.service,) = [one for one in documents if one["kind"] == "RayService"]
        self.cluster = self.service["spec"]["rayClusterConfig"]
        self.groups = [self.cluster["headGroupSpec"], *self.cluster["workerGroupSpecs"]]
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

    def _workload(self, group):
        name = group["template"]["spec"]["containers"][0]["name"]
        spec = {"template": group["template"], "replicas": group.get("replicas", 1)}
        return Workload({"kind": "RayService", "metadata": {"name": name}, "spec": spec}, self)

    @property
    def workers(self):
        return [one for one in self.workloads if one.name == "ray-worker"]

    @property
    def serve(self):
        return yaml.safe_load(self.service["spec"]["serveConfigV2"])

    @property
    def arguments(self):
        """The application's arguments, with the checkout's files. Raises ConfigError."""
        given = in_checkout(self.serve["applications"][0]["args"])
        given.get("router", {}).pop("api_key", None)  # only pods have the file
        return read(given)


def in_checkout(given):
    """Replace the image's paths by the checkout's."""
    text = yaml.safe_dump(given)
    return yaml.safe_load(text.replace(f"{dockerfile.workdir()}/", f"{ROOT}/"))


@cache
def rendered(overlay):
    return (RayManifests if overlay == "ray" else Manifests)(render(overlay))


def secrets():
    """Return the Secrets on the page as (name, key)."""
    made = re.findall(r"kubectl create secret generic (\S+) (.*)", PAGE.read_text())
    return {(name, key) for name, rest in made for key in re.findall(r"--from-file=([\w.-]+)=", rest)}


def quantity(text):
    number, unit = re.fullmatch(r"([\d.]+)(|m|Ki|Mi|Gi)", str(text) or "0").groups()
    return float(number) * UNITS[unit]
