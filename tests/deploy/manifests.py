"""Rendered manifests: documents; workloads, with the settings that their processes would read; ports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

import yaml

from baton import addresses
from baton.handoff.ports import of_worker
from baton.services.config import Settings, load
from harness.support import ROOT
from tests.deploy.network_policies import Doc, Place, matches

FOLDER = ROOT / "deploy" / "kubernetes"
PAGE = ROOT / "docs" / "clusters.md"
NAMESPACE = "baton"
WORKERS = ("prefill", "decode")
FIELDS = {"status.podIP": "10.20.30.40", "metadata.name": "a-pod"}  # what the downward API gives here
UNITS = {"": 1, "m": 0.001, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
COMPONENT = "app.kubernetes.io/component"


def render(overlay: str) -> list[Doc]:
    """Return the documents that `kubectl apply -k deploy/kubernetes/overlays/OVERLAY` would send."""
    kubectl = Path(sys.prefix) / "bin" / "kubectl"
    command = [str(kubectl), "kustomize", str(FOLDER / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


class Workload:
    """A Deployment or StatefulSet and its one container."""

    def __init__(self, document: Doc, manifests: Manifests) -> None:
        self.document = document
        self.name: str = document["metadata"]["name"]
        self.spec: Doc = document["spec"]
        self.labels: dict[str, str] = self.spec["template"]["metadata"].get("labels", {})
        self.pod: Doc = self.spec["template"]["spec"]
        self.container: Doc = self.pod["containers"][0]
        self._manifests = manifests

    def __str__(self) -> str:
        return f"{self.document['kind']} {self.name}"

    @property
    def is_ours(self) -> bool:
        return self.container["image"].partition(":")[0] == "baton"

    @property
    def kind(self) -> str:
        """Its kind, as NEEDED names it."""
        return "worker" if self.name in WORKERS else self.name

    @property
    def ports(self) -> dict[str, int]:
        return {one["name"]: one["containerPort"] for one in self.container.get("ports", [])}

    @property
    def mounts(self) -> dict[str, tuple[Doc, Doc]]:
        """The mount and the volume at each path."""
        volumes = {one["name"]: one for one in self.pod.get("volumes", [])}
        return {
            one["mountPath"]: (one, volumes.get(one["name"], {}))
            for one in self.container.get("volumeMounts", [])
        }

    @cached_property
    def environment(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for one in self.container.get("envFrom", []):
            config = self._manifests.named("ConfigMap", one["configMapRef"]["name"])
            found |= config.get("data", {}) if config else {}
        for one in self.container.get("env", []):
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                found[one["name"]] = FIELDS.get(source["fieldRef"]["fieldPath"], "")
            elif "resourceFieldRef" in source:
                found[one["name"]] = self.limit(
                    source["resourceFieldRef"]["resource"].removeprefix("limits.")
                )
            else:
                found[one["name"]] = one.get("value", "")
        return found

    def limit(self, resource: str) -> str:
        return str(self.container.get("resources", {}).get("limits", {}).get(resource, ""))

    @cached_property
    def settings(self) -> Settings:
        """Raises ConfigError."""
        with patch.dict(os.environ, self.environment, clear=True):
            return load()

    @property
    def place(self) -> Place:
        return Place(self.name, NAMESPACE, self.labels, self.ports)


class Manifests:
    """Rendered documents."""

    def __init__(self, documents: list[Doc]) -> None:
        self.documents = documents
        self.workloads = [Workload(one, self) for one in self.of("Deployment", "StatefulSet")]

    def of(self, *kinds: str) -> list[Doc]:
        return [one for one in self.documents if one["kind"] in kinds]

    def named(self, kind: str, name: str) -> Doc | None:
        return next((one for one in self.of(kind) if one["metadata"]["name"] == name), None)

    @property
    def ours(self) -> list[Workload]:
        """Those that run Baton."""
        return [one for one in self.workloads if one.is_ours]

    @property
    def workers(self) -> list[Workload]:
        return [one for one in self.ours if one.kind == "worker"]

    def workload(self, name: str) -> Workload:
        return next(one for one in self.workloads if one.name == name)

    def selected(self, selector: Doc) -> list[str]:
        return [one.name for one in self.workloads if matches(selector, one.labels)]


def secrets() -> set[tuple[str, str]]:
    """Return the Secrets, each with its key, that the page says how to make."""
    made = re.findall(r"kubectl create secret generic (\S+) (.*)", PAGE.read_text())
    return {(name, key) for name, rest in made for key in re.findall(r"--from-file=([\w.-]+)=", rest)}


def ports(one: Workload) -> list[int]:
    """Return the ports on which it listens; the first is that of its requests."""
    settings = one.settings
    if one.kind == "ca":
        return [addresses.split(ca_address(one))[1]]
    if one.kind == "router":
        own = [settings.router.port]
    else:
        listens = settings.scheduler.address if one.kind == "scheduler" else settings.worker.listen
        own = [addresses.split(listens)[1]]
    if figures := metrics_port(one):
        own.append(figures)
    return own + (_handoff_ports(settings) if one.kind == "worker" else [])


def metrics_port(one: Workload) -> int:
    """Return the port of its metrics; 0 for a free one on loopback. Not for the CA, which has none."""
    found: int = getattr(one.settings, one.kind).metrics_port
    return found


def ca_address(one: Workload) -> str:
    """Return where `baton ca serve` listens: a flag, as nobody else needs to know."""
    words = one.container["command"]
    found: str = words[words.index("--listen") + 1] if "--listen" in words else "127.0.0.1:7443"
    return found


def port_of(manifests: Manifests, name: str, setting: str) -> list[int]:
    """Return the ports of a workload that a setting names."""
    if name == "redis":
        return list(manifests.workload(name).ports.values())
    if name == "ca":
        return ports(manifests.workload(name))
    settings = manifests.workload(name).settings
    if setting == "handoff.port":
        return _handoff_ports(settings)
    section, _, key = setting.partition(".")
    value = getattr(getattr(settings, section), key)
    if not value:  # a free port on loopback
        return []
    return [value if isinstance(value, int) else addresses.split(value)[1]]


def _handoff_ports(settings: Settings) -> list[int]:
    return list(of_worker(settings.handoff.port, settings.engine.tensor_parallel_size))


def listens(one: Workload) -> list[str]:
    settings = one.settings
    if one.kind == "router":
        return [settings.router.host]
    if one.kind == "ca":
        return [ca_address(one)]
    if one.kind == "scheduler":
        return [settings.scheduler.address]
    return [settings.worker.listen, *([settings.handoff.host] if settings.handoff.host else [])]


def quantity(text: str) -> float:
    """Return a quantity such as 500m or 2Gi as a number."""
    number, unit = re.fullmatch(r"([\d.]+)(|m|Ki|Mi|Gi)", str(text) or "0").groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]
