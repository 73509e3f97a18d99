"""deploy/kubernetes, without a cluster: rendered by kubectl, validated, and checked against Baton itself."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from harness import dockerfile
from harness.support import ROOT, eventually, free_port, listening
from tests.deploy import ray_service
from tests.deploy.dialling import NEEDED
from tests.deploy.kubernetes import problems
from tests.deploy.manifests import PAGE, Manifests, port_of, render, secrets
from tests.deploy.network_policies import Doc

OVERLAYS = ("cpu", "gpu")


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Doc]]:
    return {name: render(name) for name in OVERLAYS}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_fits_kubernetes_and_baton(rendered: dict[str, list[Doc]], overlay: str) -> None:
    assert not problems(rendered[overlay])


def test_every_overlay_is_checked() -> None:
    checked = {*OVERLAYS, "ray"}  # that by test_ray_service.py
    assert {one.name for one in (ROOT / "deploy/kubernetes/overlays").iterdir()} == checked


# Edits of the rendered documents, each of which a check must find.


def doc(documents: list[Doc], kind: str, name: str) -> Doc:
    """A generated name ends in a digest."""
    return next(
        one
        for one in documents
        if one["kind"] == kind and re.fullmatch(rf"{name}(-[a-z0-9]{{10}})?", one["metadata"]["name"])
    )


def pod(documents: list[Doc], name: str) -> Doc:
    kind = "StatefulSet" if name == "scheduler" else "Deployment"
    found: Doc = doc(documents, kind, name)["spec"]["template"]["spec"]
    return found


def container(documents: list[Doc], name: str) -> Doc:
    found: Doc = pod(documents, name)["containers"][0]
    return found


def spec(documents: list[Doc], kind: str, name: str) -> Doc:
    found: Doc = doc(documents, kind, name)["spec"]
    return found


def settings(documents: list[Doc], name: str, **values: str) -> None:
    doc(documents, "ConfigMap", name)["data"].update(values)


def volume(documents: list[Doc], workload: str, name: str) -> Doc:
    found: Doc = next(one for one in pod(documents, workload)["volumes"] if one["name"] == name)
    return found


def emptied(its: Doc) -> None:
    del its["persistentVolumeClaim"]
    its["emptyDir"] = {"sizeLimit": "1Mi"}


def mount(documents: list[Doc], workload: str, name: str) -> Doc:
    found: Doc = next(one for one in container(documents, workload)["volumeMounts"] if one["name"] == name)
    return found


def probe(documents: list[Doc], workload: str, kind: str) -> list[str]:
    found: list[str] = container(documents, workload)[f"{kind}Probe"]["exec"]["command"]
    return found


def remove(items: list[Doc], **wanted: Any) -> None:
    (found,) = [one for one in items if wanted.items() <= one.items()]
    items.remove(found)


Edit = Callable[[list[Doc]], Any]
# What is done, and a part of the line that must say so.
EDITS: dict[str, tuple[Edit, str]] = {
    # Kubernetes itself
    "a misspelt key": (lambda d: pod(d, "router").update(terminationGracePeriodSecond=90), "schema: "),
    "a number as text": (lambda d: spec(d, "Deployment", "router").update(replicas="2"), "schema: "),
    "a port of the wrong type": (
        lambda d: container(d, "prefill")["ports"][0].update(containerPort="grpc"),
        "schema: ",
    ),
    # names and references
    "another namespace": (
        lambda d: doc(d, "Service", "redis")["metadata"].update(namespace="default"),
        "is not in the namespace",
    ),
    "a laxer namespace": (
        lambda d: doc(d, "Namespace", "baton")["metadata"].pop("labels"),
        "does not enforce the restricted",
    ),
    "a part is missing": (lambda d: d.remove(doc(d, "Deployment", "decode")), "not exactly a CA"),
    "something twice": (lambda d: d.append(doc(d, "Service", "router")), "is there twice"),
    "no such ConfigMap": (lambda d: d.remove(doc(d, "ConfigMap", "worker")), "there is no ConfigMap"),
    "no such Secret": (
        lambda d: volume(d, "router", "keys")["secret"].update(secretName="keys"),
        "does not say how to make the Secret 'keys'",
    ),
    "no such claim": (lambda d: d.remove(doc(d, "PersistentVolumeClaim", "models")), "there is no claim"),
    "no such volume": (
        lambda d: remove(pod(d, "decode")["volumes"], name="tmp"),
        "'tmp' is not both declared and mounted",
    ),
    # selectors
    "a Service without pods": (
        lambda d: spec(d, "Service", "router").update(selector={"app": "router"}),
        "Service router selects the pods of []",
    ),
    "a Service with too many": (
        lambda d: spec(d, "Service", "scheduler").update(selector={}),
        "Service scheduler selects",
    ),
    "a Service to no port": (
        lambda d: spec(d, "Service", "router")["ports"][0].update(targetPort="web"),
        "no port 'web'",
    ),
    "a Deployment of other pods": (
        lambda d: spec(d, "Deployment", "decode").update(
            selector={"matchLabels": {"baton/engine": "worker"}}
        ),
        "Deployment decode selects",
    ),
    "no budget": (lambda d: d.remove(doc(d, "PodDisruptionBudget", "router")), "has 0 disruption budgets"),
    "a budget for all workers": (
        lambda d: (
            d.remove(doc(d, "PodDisruptionBudget", "decode")),
            spec(d, "PodDisruptionBudget", "prefill").update(
                selector={"matchLabels": {"baton/engine": "worker"}}
            ),
        ),
        "is not its own",
    ),
    "a budget that blocks": (
        lambda d: spec(d, "PodDisruptionBudget", "prefill").update(maxUnavailable=0),
        "lets no node be drained",
    ),
    "one router": (lambda d: spec(d, "Deployment", "router").update(replicas=1), "one router alone"),
    # settings and commands
    "a misspelt setting": (
        lambda d: settings(d, "worker", BATON_WORKER__DRAIN_TIMEOUT="60"),
        "unknown key 'worker.drain_timeout'",
    ),
    "a misspelt section": (lambda d: settings(d, "router", BATON_ROUTERS__PORT="8000"), "key 'routers'"),
    "a misspelt prefix": (lambda d: settings(d, "router", BATTON_ROUTER__PORT="8000"), "nobody reads"),
    "a value that is none": (
        lambda d: settings(d, "settings", BATON_ENGINE__TENSOR_PARALLEL_SIZE="two"),
        "engine.tensor_parallel_size",
    ),
    "two schedulers, no store": (
        lambda d: settings(d, "settings", BATON_SCHEDULER__STORE="memory"),
        "scheduler.store is memory",
    ),
    "an unknown command": (lambda d: container(d, "decode").update(command=["baton", "decoder"]), "decoder"),
    "an unknown flag": (lambda d: container(d, "router").update(args=["--workers", "2"]), "--workers"),
    "plain text, though nobody said so": (
        lambda d: doc(d, "ConfigMap", "settings")["data"].pop("BATON_SECURITY__TLS"),
        "without tls",
    ),
    "plain text by word": (
        lambda d: (
            doc(d, "ConfigMap", "join").update(data={}),
            doc(d, "ConfigMap", "settings")["data"].update(
                BATON_SECURITY__TLS="false", BATON_SECURITY__INSECURE="true"
            ),
        ),
        "speaks plain text",
    ),
    "a CA elsewhere": (
        lambda d: settings(d, "join", BATON_SECURITY__JOIN="ca:7444"),
        "joins at 'ca:7444'",
    ),
    "another role's token": (
        lambda d: volume(d, "decode", "token")["secret"].update(secretName="router-token"),
        "no token of its role",
    ),
    "a certificate on a read-only disk": (
        lambda d: settings(d, "join", BATON_SECURITY__FOLDER="/etc/baton/identity"),
        "where it may not write",
    ),
    "no certificate for the probe": (
        lambda d: doc(d, "ConfigMap", "join")["data"].pop("BATON_SECURITY__FOLDER"),
        "finds no certificate to show",
    ),
    "the CA's key on a disk": (
        lambda d: volume(d, "ca", "ca")["emptyDir"].pop("medium"),
        "no folder in memory",
    ),
    "revocations that go with the pod": (
        lambda d: emptied(volume(d, "ca", "kept")),
        "forgotten with its pod",
    ),
    "two pods of one volume": (
        lambda d: doc(d, "Deployment", "ca")["spec"].pop("strategy"),
        "waits for ever for the volume",
    ),
    "a CA without its key": (
        lambda d: remove(pod(d, "ca")["initContainers"], name="key"),
        "'secret' is not both declared and mounted",
    ),
    "a key that is not copied": (
        lambda d: next(one for one in pod(d, "ca")["initContainers"] if one["name"] == "key").update(
            command=["true"]
        ),
        "nobody copies its key",
    ),
    "a CA probed in plain text": (
        lambda d: container(d, "ca")["livenessProbe"]["httpGet"].pop("scheme"),
        "does not ask the CA",
    ),
    "a setting as a flag": (lambda d: container(d, "router").update(args=["--port", "8000"]), "ConfigMap"),
    "the other role": (
        lambda d: container(d, "decode").update(command=["baton", "prefill"]),
        "runs ['prefill']",
    ),
    "a shell as first process": (
        lambda d: container(d, "router").update(command=["sh", "-c", "baton router"]),
        "does not run baton itself",
    ),
    "routers of another model": (
        lambda d: settings(d, "router", BATON_ENGINE__SERVED_MODEL_NAME="other"),
        "different engine settings: ['served_model_name']",
    ),
    "another lease for one part": (
        lambda d: settings(d, "worker", BATON_SCHEDULER__WORKER_LEASE_S="9"),
        "different scheduler settings",
    ),
    # ports and addresses
    "a port that nobody opens": (
        lambda d: container(d, "scheduler")["ports"][0].update(containerPort=7500),
        "listens on [7400, 9400]",
    ),
    "metrics without their port": (
        lambda d: doc(d, "ConfigMap", "worker")["data"].pop("BATON_WORKER__METRICS_PORT"),
        "listens on [7401",
    ),
    "metrics that only their own pod reaches": (
        lambda d: doc(d, "ConfigMap", "router")["data"].pop("BATON_ROUTER__METRICS_PORT"),
        "router.metrics_port is not set",
    ),
    "loopback only": (
        lambda d: settings(d, "router", BATON_ROUTER__HOST="127.0.0.1"),
        "where others do not reach it",
    ),
    "a third scheduler that nobody knows": (
        lambda d: spec(d, "StatefulSet", "scheduler").update(replicas=3),
        "looks for schedulers at",
    ),
    "a balancer before the schedulers": (
        lambda d: spec(d, "Service", "scheduler").pop("clusterIP"),
        "no headless Service",
    ),
    "schedulers hidden without Redis": (
        lambda d: spec(d, "Service", "scheduler").pop("publishNotReadyAddresses"),
        "hides a scheduler",
    ),
    "a store that is not there": (
        lambda d: settings(d, "settings", BATON_SCHEDULER__STORE="redis://redis-master:6379/0"),
        "there is no store at redis-master:6379",
    ),
    "no address to advertise": (
        lambda d: remove(container(d, "decode")["env"], name="BATON_WORKER__ADVERTISE"),
        "does not advertise its pod's address",
    ),
    # probes and ends
    "a probe of another port": (
        lambda d: probe(d, "prefill", "readiness").__setitem__(2, "127.0.0.1:7402"),
        "does not ask the port of gRPC",
    ),
    "a probe that speaks no TLS": (
        lambda d: container(d, "prefill").update(livenessProbe={"grpc": {"port": 7401}}),
        "is not the command that shows a certificate",
    ),
    "a probe without time": (
        lambda d: container(d, "decode")["livenessProbe"].pop("timeoutSeconds"),
        "is over before its command",
    ),
    "a probe of an unknown service": (
        lambda d: probe(d, "scheduler", "readiness").append("Scheduler"),
        "which is not served",
    ),
    "a probe that needs a key": (
        lambda d: container(d, "router")["livenessProbe"]["httpGet"].update(path="/v1/models"),
        "which needs a key",
    ),
    "routers killed for want of workers": (
        lambda d: container(d, "router")["livenessProbe"]["httpGet"].update(path="/health"),
        "liveness probe asks /health",
    ),
    "a worker killed as it drains": (
        lambda d: container(d, "decode")["livenessProbe"].update(failureThreshold=3),
        "kills a worker that drains",
    ),
    "no time to load": (lambda d: container(d, "decode").pop("startupProbe"), "no startup probe"),
    "no readiness": (lambda d: container(d, "redis").pop("readinessProbe"), "no readiness probe"),
    "a drain beyond the grace": (
        lambda d: settings(d, "worker", BATON_WORKER__DRAIN_TIMEOUT_S="80"),
        "is killed after 90 s",
    ),
    "no grace": (
        lambda d: pod(d, "router").pop("terminationGracePeriodSeconds"),
        "is killed after 30 s",
    ),
    "no preStop": (lambda d: container(d, "router").pop("lifecycle"), "before its Service knows"),
    # files
    "keys elsewhere": (
        lambda d: settings(d, "router", BATON_ROUTER__API_KEY_FILE="/etc/baton/keys"),
        "router.api_key_file is '/etc/baton/keys'",
    ),
    "no keys": (
        lambda d: doc(d, "ConfigMap", "router")["data"].pop("BATON_ROUTER__API_KEY_FILE"),
        "router.api_key_file is ''",
    ),
    "the password elsewhere": (
        lambda d: mount(d, "redis", "password").update(mountPath="/run/redis"),
        "reads '/run/secrets/redis/password'",
    ),
    "a secret that all may read": (
        lambda d: volume(d, "scheduler", "redis-password")["secret"].pop("defaultMode"),
        "everybody in the pod may read",
    ),
    "a model that is on no volume": (
        lambda d: settings(d, "settings", BATON_ENGINE__MODEL="/model"),
        "is on no volume",
    ),
    "a model that may be changed": (
        lambda d: mount(d, "decode", "models").pop("readOnly"),
        "may write to /models",
    ),
    "no shared memory": (
        lambda d: volume(d, "prefill", "shm")["emptyDir"].pop("medium"),
        "no /dev/shm of its own",
    ),
    "more shared memory than memory": (
        lambda d: volume(d, "prefill", "shm")["emptyDir"].update(sizeLimit="96Gi"),
        "counts as memory",
    ),
    "an empty home": (lambda d: pod(d, "decode").update(initContainers=[]), "what the image prepared there"),
    "a home from nowhere": (
        lambda d: pod(d, "decode")["initContainers"][0].update(command=["true"]),
        "what the image prepared there",
    ),
    # rights and resources
    "root": (lambda d: pod(d, "router")["securityContext"].pop("runAsNonRoot"), "may run as root"),
    "an unknown user": (
        lambda d: pod(d, "router")["securityContext"].update(runAsUser=1001),
        "runs as 1001",
    ),
    "more rights": (lambda d: container(d, "decode").pop("securityContext"), "may get more rights"),
    "an image that changes": (
        lambda d: container(d, "redis")["securityContext"].update(readOnlyRootFilesystem=False),
        "may change its image's files",
    ),
    "a token": (lambda d: pod(d, "decode").pop("automountServiceAccountToken"), "has a token"),
    "variables of Services": (lambda d: pod(d, "decode").pop("enableServiceLinks"), "gets variables"),
    "no limit": (lambda d: container(d, "router")["resources"].pop("limits"), "memory has no limit"),
    "no request": (lambda d: container(d, "router")["resources"].pop("requests"), "requests no cpu"),
    "two images": (lambda d: container(d, "router").update(image="baton:old"), "several images"),
    "too few GPUs": (
        lambda d: container(d, "decode")["resources"]["limits"].update({"nvidia.com/gpu": 1}),
        "not as many GPUs",
    ),
    "more ranks than GPUs": (
        lambda d: settings(d, "settings", BATON_ENGINE__TENSOR_PARALLEL_SIZE="4"),
        "not as many GPUs",
    ),
    # the network
    "nothing is closed": (
        lambda d: d.remove(doc(d, "NetworkPolicy", "nothing-else")),
        "redis must not be let out to",
    ),
    "routers cannot reach workers": (
        lambda d: spec(d, "NetworkPolicy", "router")["egress"].pop(1),
        "router must be let out to decode at 7401/TCP",
    ),
    "workers refuse KV": (
        lambda d: spec(d, "NetworkPolicy", "worker")["ingress"].pop(1),
        "decode must let prefill in at 7402/TCP",
    ),
    "workers cannot follow each other": (
        lambda d: spec(d, "NetworkPolicy", "worker")["ingress"][1]["ports"].pop(1),
        "decode must let prefill in at 7401/TCP",
    ),
    "KV of the first rank only": (
        lambda d: spec(d, "NetworkPolicy", "worker")["egress"][1]["ports"][0].pop("endPort"),
        "must be let out to decode at 7403/TCP",
    ),
    "too many ports": (
        lambda d: spec(d, "NetworkPolicy", "worker")["ingress"][1]["ports"][0].update(endPort=7499),
        "must not let prefill in at 7406/TCP",
    ),
    "every port": (
        lambda d: spec(d, "NetworkPolicy", "redis")["ingress"][0].pop("ports"),
        "redis must not let scheduler in at 22/TCP",
    ),
    "everybody at Redis": (
        lambda d: spec(d, "NetworkPolicy", "redis")["ingress"][0].pop("from"),
        "redis must not let decode in at 6379/TCP",
    ),
    "routers cannot share limits": (
        lambda d: spec(d, "NetworkPolicy", "router")["egress"].pop(2),
        "router must be let out to redis at 6379/TCP",
    ),
    "Redis refuses routers": (
        lambda d: spec(d, "NetworkPolicy", "redis")["ingress"][0]["from"].pop(1),
        "redis must let router in at 6379/TCP",
    ),
    "strangers at the workers": (
        lambda d: spec(d, "NetworkPolicy", "worker")["ingress"][0]["from"].append({"namespaceSelector": {}}),
        "must not let a pod of another namespace in at 7401/TCP",
    ),
    "an address block": (
        lambda d: spec(d, "NetworkPolicy", "scheduler")["ingress"][0]["from"].append(
            {"ipBlock": {"cidr": "10.0.0.0/8"}}
        ),
        "scheduler must not let something outside in at 7400/TCP",
    ),
    "a worker that cannot join": (
        lambda d: spec(d, "NetworkPolicy", "worker")["egress"].pop(2),
        "must be let out to ca at 7443/TCP",
    ),
    "strangers at the CA": (
        lambda d: spec(d, "NetworkPolicy", "ca")["ingress"][0].pop("from"),
        "ca must not let something outside in at 7443/TCP",
    ),
    "no roles": (
        lambda d: spec(d, "NetworkPolicy", "scheduler")["egress"].pop(1),
        "scheduler must be let out to decode at 7401/TCP",
    ),
    "no names": (
        lambda d: d.remove(doc(d, "NetworkPolicy", "names")),
        "must be let out to dns at 53/UDP",
    ),
    "every name server": (
        lambda d: spec(d, "NetworkPolicy", "names")["egress"][0].pop("to"),
        "must not be let out to something outside at 53",
    ),
    "routers that nobody scrapes": (
        lambda d: spec(d, "NetworkPolicy", "router")["ingress"].pop(1),
        "router must let prometheus in at 9402/TCP",
    ),
    "routers for one namespace": (
        lambda d: spec(d, "NetworkPolicy", "router")["ingress"][0].update({"from": [{"podSelector": {}}]}),
        "router must let something outside in at 8000/TCP",
    ),
    "egress forgotten": (
        lambda d: spec(d, "NetworkPolicy", "nothing-else").update(policyTypes=["Ingress"]),
        "redis must not be let out to",
    ),
    "a port that Redis left": (
        lambda d: container(d, "redis")["ports"][0].update(containerPort=6380),
        "Redis does not listen on 6380",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_edit_is_found(rendered: dict[str, list[Doc]], name: str) -> None:
    documents = copy.deepcopy(rendered["gpu"])
    edit, said = EDITS[name]
    edit(documents)
    found = problems(documents)
    assert any(said in one for one in found), found


# What is run, and what the page says.


def test_the_page_has_the_table_of_who_dials_whom(rendered: dict[str, list[Doc]]) -> None:
    manifests = Manifests(rendered["cpu"])
    rows = re.findall(r"^\| (\w+) \| (\w+) \| (\d+) \| `([\w.-]+)` \|", PAGE.read_text(), re.MULTILINE)
    expected = []
    for one in NEEDED:
        number = port_of(manifests, "prefill" if one.target == "worker" else one.target, one.setting)[0]
        expected.append((one.source, one.target, str(number), one.setting))
    on_ray = [(source, target, str(port), setting) for source, target, port, setting in ray_service.NEEDED]
    assert rows == expected + on_ray


PASSWORD = 'correct "horse\\ $HOME'


def test_redis_runs_as_it_is_written(rendered: dict[str, list[Doc]], tmp_path: Path) -> None:
    """With its Secret, and the probe that asks it; on a free port."""
    assert ("redis", "password") in secrets()
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    port = free_port()

    def here(words: list[str]) -> list[str]:
        moved = [one.replace("/run/secrets/redis/password", str(password)) for one in words]
        return [
            one.replace("port 6379", f"port {port}").replace("redis-cli", f"redis-cli -p {port}")
            for one in moved
        ]

    one = container(rendered["cpu"], "redis")
    server = subprocess.Popen(here(one["command"]), stdout=subprocess.DEVNULL, cwd=tmp_path)
    probe = here(one["livenessProbe"]["exec"]["command"])
    try:
        eventually(lambda: listening(port), 10, "Redis listens")
        with redis.Redis(port=port, password=PASSWORD) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("save") == {"save": ""}
        with (
            redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()
        assert subprocess.run(probe, capture_output=True, timeout=20, check=False).returncode == 0
        password.write_text("another")
        assert subprocess.run(probe, capture_output=True, timeout=20, check=False).returncode != 0
        assert "correct" not in Path(f"/proc/{server.pid}/cmdline").read_text()
        assert Path(f"/proc/{server.pid}/comm").read_text().strip() == "redis-server"  # SIGTERM reaches it
    finally:
        server.kill()
        server.wait(10)


def test_the_home_is_copied_without_the_rights_of_its_owner(rendered: dict[str, list[Doc]]) -> None:
    """A volume's folder belongs to root, and is open to the pod's group."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can run a command as another user")
    (first,) = pod(rendered["cpu"], "decode")["initContainers"]
    user = pod(rendered["cpu"], "decode")["securityContext"]["runAsUser"]
    with tempfile.TemporaryDirectory(prefix="baton-home-") as scratch:
        Path(scratch).chmod(0o755)
        home, copied = Path(scratch, "home"), Path(scratch, "copy")
        (home / ".cache").mkdir(parents=True)
        (home / ".cache" / "compiled").write_text("x")
        copied.mkdir()
        copied.chmod(0o2777)
        moved = {
            f"/home/{dockerfile.user()}/.": f"{home}/.",
            first["volumeMounts"][0]["mountPath"]: str(copied),
        }
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        command = [*as_user, *(moved.get(word, word) for word in first["command"])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 0, done.stderr
        assert (copied / ".cache" / "compiled").read_text() == "x"
