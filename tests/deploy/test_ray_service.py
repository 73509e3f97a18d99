"""deploy/kubernetes/overlays/ray, without a cluster: rendered, and checked against Ray and Baton."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.manifests import render
from tests.deploy.network_policies import Doc
from tests.deploy.ray_service import problems

CRDS = "KUBERAY_CRDS"  # the folder with ray.io_rayservices.yaml, of KubeRay's ray-operator/config/crd/bases


@pytest.fixture(scope="module")
def rendered() -> list[Doc]:
    return render("ray")


def test_the_overlay_fits_kubernetes_ray_and_baton(rendered: list[Doc]) -> None:
    assert not problems(rendered)


def service(documents: list[Doc]) -> Doc:
    found: Doc = next(one for one in documents if one["kind"] == "RayService")["spec"]
    return found


def group(documents: list[Doc], name: str) -> Doc:
    cluster = service(documents)["rayClusterConfig"]
    found: Doc = cluster["headGroupSpec"] if name == "head" else cluster["workerGroupSpecs"][0]
    return found


def pod(documents: list[Doc], name: str) -> Doc:
    found: Doc = group(documents, name)["template"]["spec"]
    return found


def container(documents: list[Doc], name: str) -> Doc:
    found: Doc = pod(documents, name)["containers"][0]
    return found


def policy(documents: list[Doc], name: str) -> Doc:
    found: Doc = next(
        one for one in documents if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", name)
    )["spec"]
    return found


def serving(documents: list[Doc], old: str, new: str) -> None:
    text = service(documents)["serveConfigV2"]
    assert old in text
    service(documents)["serveConfigV2"] = text.replace(old, new)


Edit = Callable[[list[Doc]], Any]
# What is done, and a part of the line that must say so.
EDITS: dict[str, tuple[Edit, str]] = {
    "a misspelt key of a pod": (lambda d: pod(d, "workers").update(volume=[]), "schema: PodTemplate workers"),
    "another namespace": (
        lambda d: next(one for one in d if one["kind"] == "RayService")["metadata"].update(namespace="x"),
        "is not in the namespace",
    ),
    "no budget": (
        lambda d: d.remove(next(one for one in d if one["kind"] == "PodDisruptionBudget")),
        "a budget for ray-worker",
    ),
    "Ray's own builder": (lambda d: serving(d, "baton.ray:build", "ray.serve.llm:build"), "is not Baton's"),
    "no such option of Serve": (
        lambda d: serving(d, "route_prefix", "rout_prefix"),
        "Serve knows no 'rout_prefix'",
    ),
    "no such option of Baton": (
        lambda d: serving(d, "prefill_config", "prefil_config"),
        "args: unknown key 'prefil_config'",
    ),
    "what Baton cannot do": (
        lambda d: serving(d, "deployment_config: {num", "llm_engine: SGLang\n      deployment_config: {num"),
        "'SGLang' is not served",
    ),
    "a model that is not in the image": (lambda d: serving(d, "weights-mtp", "weight"), "does not exist"),
    "more workers than room": (
        lambda d: serving(d, "max_replicas: 3", "max_replicas: 4"),
        "workers want 5 CPU",
    ),
    "more cores than the pod has": (
        lambda d: group(d, "workers")["rayStartParams"].update({"num-cpus": "4"}),
        "more cores than the pod has",
    ),
    "an unknown option of Ray": (
        lambda d: group(d, "head")["rayStartParams"].update({"num-cpu": "1"}),
        "no option --num-cpu",
    ),
    "Serve elsewhere": (lambda d: serving(d, "port: 8000", "port: 8001"), "'serve': 8001"),
    "a port that Ray does not have": (
        lambda d: container(d, "head")["ports"][0].update(containerPort=6380),
        "lists the ports",
    ),
    "a setting that the pods of Ray do not pass on": (
        lambda d: container(d, "workers")["env"].append({"name": "BATON_ROUTER__PORT", "value": "1"}),
        "nobody reads the variable BATON_ROUTER__PORT",
    ),
    "engines of low priority": (lambda d: container(d, "workers")["env"].pop(), "engines give way"),
    "a command": (lambda d: container(d, "head").update(command=["baton"]), "KubeRay writes the command"),
    "a probe by wget": (lambda d: container(d, "workers").pop("readinessProbe"), "needs wget"),
    "another Ray": (
        lambda d: service(d)["rayClusterConfig"].update(rayVersion="2.53.0"),
        "rayVersion is 2.53.0",
    ),
    "Ray without a token": (lambda d: service(d)["rayClusterConfig"].pop("authOptions"), "authOptions"),
    "keys elsewhere": (lambda d: serving(d, "router/keys", "keys"), "where no key of a Secret is mounted"),
    "no volume": (lambda d: pod(d, "head")["volumes"].pop(), "not both declared and mounted"),
    "root": (lambda d: pod(d, "workers")["securityContext"].pop("runAsNonRoot"), "may run as root"),
    "an image that changes": (
        lambda d: container(d, "head")["securityContext"].update(readOnlyRootFilesystem=False),
        "may change its image's files",
    ),
    "no limit": (lambda d: container(d, "head")["resources"]["limits"].pop("memory"), "memory has no limit"),
    "two images": (lambda d: container(d, "head").update(image="baton:old"), "several images"),
    "strangers at the dashboard": (
        lambda d: policy(d, "ray-head")["ingress"][0].pop("from"),
        "ray-head must not let something outside in at 8265/TCP",
    ),
    "KubeRay cannot reach Ray": (
        lambda d: policy(d, "ray-head").update(ingress=[]),
        "ray-head must let kuberay in at 8265/TCP",
    ),
    "strangers among the nodes": (
        lambda d: policy(d, "ray")["ingress"][0]["from"].append({"podSelector": {}}),
        "must not let another pod of the namespace in at 22/TCP",
    ),
    "nodes that do not reach each other": (
        lambda d: policy(d, "ray")["egress"].pop(0),
        "must be let out to ray-worker at 22/TCP",
    ),
    "nothing is closed": (
        lambda d: (
            policy(d, "ray").update(policyTypes=["Ingress"])
            or policy(d, "nothing-else").update(policyTypes=["Ingress"])
        ),
        "must not be let out to something outside",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_edit_is_found(rendered: list[Doc], name: str) -> None:
    documents = copy.deepcopy(rendered)
    edit, said = EDITS[name]
    edit(documents)
    found = problems(documents)
    assert any(said in one for one in found), found


# KubeRay's own schema, which no package ships.


@pytest.fixture(scope="module")
def crd() -> Doc:
    """The schema of RayService v1, closed: a key that it does not know is an error."""
    folder = os.environ.get(CRDS)
    if not folder:
        pytest.skip(f"{CRDS} names no folder with KubeRay's CRDs (ray-operator/config/crd/bases)")
    with (Path(folder) / "ray.io_rayservices.yaml").open() as file:
        versions = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    (found,) = [one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1"]
    _close(found)
    return dict(found)


def _close(schema: Any) -> None:
    for one in _every(schema):
        if "properties" in one and not one.get("x-kubernetes-preserve-unknown-fields"):
            one.setdefault("additionalProperties", False)


def _every(schema: Any) -> Iterator[Doc]:
    if isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            yield from (
                (each for one in value.values() for each in _every(one))
                if key == "properties"
                else _every(value)
            )
    elif isinstance(schema, list):
        for one in schema:
            yield from _every(one)


def _against(crd: Doc, documents: list[Doc]) -> list[str]:
    (one,) = [copy.deepcopy(each) for each in documents if each["kind"] == "RayService"]
    one["metadata"] = {}  # which the API server checks itself
    return [error.message for error in jsonschema.Draft4Validator(crd).iter_errors(one)]


def test_kuberays_own_schema(crd: Doc, rendered: list[Doc]) -> None:
    assert not _against(crd, rendered)
    wrong = copy.deepcopy(rendered)
    service(wrong)["serveConfigV3"] = ""
    container(wrong, "workers")["imag"] = "baton"
    found = _against(crd, wrong)
    assert any("serveConfigV3" in one for one in found)
    assert any("imag" in one for one in found)
