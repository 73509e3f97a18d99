"""deploy/kubernetes without a cluster: the manifests that kubectl renders, checked against schemas and Baton.

The schemas are from the package kubernetes-validate. The other tests compare manifests with Baton's settings,
command line, ports and drain times.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from typer.testing import CliRunner

from baton import addresses
from baton.protos import worker_pb2
from baton.redis_url import password_file
from baton.security.authority import KEPT, KEY, TOKENS
from baton.security.authority import ROOT as CA_CERTIFICATE
from baton.services import identities
from baton.services.cli.main import app
from baton.services.config import ENV_PREFIX
from baton.services.router.http.authentication import OPEN
from harness import dockerfile
from harness.support import ROOT, eventually, free_port, listening, ran
from tests.deploy.leader_worker_set import validate
from tests.deploy.manifests import FIELDS, NAMESPACE, quantity, rendered, secrets
from tests.deploy.network_policies import matches

OVERLAYS = ("cpu", "gpu", "lws")
VERSIONS = ("1.30", "1.37")  # the oldest in docs/clusters.md, and the newest known
# Read by Baton's libraries, or parts of other variables.
OTHER_VARIABLES = {"HF_HUB_OFFLINE", "OMP_NUM_THREADS", "GROUP", "GROUP_RANK"}
KUBELET_GRACE_S = 15.0  # time that a process has to end after its drain
HOME = f"/home/{dockerfile.user()}"
HEALTH_CHECK = f"{dockerfile.workdir()}/deploy/healthcheck.py"
HEALTH_CHECK_S = 3.0  # its start and its timeout of 2 s
WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


@pytest.fixture(params=OVERLAYS)
def manifests(request):
    return rendered(request.param)


@pytest.fixture(params=[*OVERLAYS, "ray"])
def every(request):
    return rendered(request.param)


def test_every_overlay_is_tested():
    assert {one.name for one in (ROOT / "deploy/kubernetes/overlays").iterdir()} == {*OVERLAYS, "ray"}


# -- every overlay


@pytest.mark.parametrize("version", VERSIONS)
def test_documents_match_kubernetes_schemas(every, version):
    for one in every.documents:
        validate(one, version)


def test_config_maps_secrets_claims_and_volumes_exist(every):
    for one in every.workloads:
        for source in one.container.get("envFrom", []):
            assert every.named("ConfigMap", source["configMapRef"]["name"])
        volumes = one.pod.get("volumes", [])
        mounted = {mount["name"] for each in one.containers for mount in each.get("volumeMounts", [])}
        assert {volume["name"] for volume in volumes} == mounted, one
        for volume in volumes:
            if "persistentVolumeClaim" in volume:
                assert every.named("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
            if "secret" in volume:
                assert volume["secret"]["secretName"] in {name for name, _ in secrets()}, one


def test_other_volumes_are_read_only(every):
    for one in every.workloads:
        for path, (mount, volume) in one.mounts.items():
            if "emptyDir" in volume:
                assert volume["emptyDir"].get("sizeLimit"), f"{one}: {path} may fill its node"
            elif not (one.kind == "ca" and path == f"{one.settings.security.ca}/{KEPT}"):
                assert mount.get("readOnly"), f"{one} may write to {path}"
            if "secret" in volume:
                assert not volume["secret"]["defaultMode"] & 0o007, f"{one}: all may read {path}"


def test_the_home_is_copied_from_the_image(every):
    for one in every.ours:
        assert {HOME, "/tmp"} <= one.mounts.keys(), one
        (copy,) = [each for each in one.first if f"{HOME}/." in each["command"]]
        home = {"name": one.mounts[HOME][0]["name"], "mountPath": copy["command"][-1]}
        assert copy["volumeMounts"] == [home], one


def test_workers_have_shared_memory(every):
    for one in every.workers:
        shm = one.mounts["/dev/shm"][1]["emptyDir"]
        assert shm["medium"] == "Memory", one
        assert quantity(shm["sizeLimit"]) < quantity(one.limit("memory")), one  # it counts as memory


def test_pods_have_no_privileges(every):
    (line,) = [text for text in dockerfile.texts("RUN") if text.startswith("useradd")]
    uid = re.search(r"--uid (\d+)", line)
    for one in every.workloads:
        pod = one.pod["securityContext"]
        assert pod["runAsNonRoot"], one
        assert pod["runAsUser"], one
        assert not one.is_ours or pod["runAsUser"] == int(uid[1] if uid else 0), one
        assert pod["fsGroup"] == pod["runAsGroup"], f"{one} cannot read its secrets"
        assert pod["seccompProfile"]["type"] == "RuntimeDefault", one
        assert one.pod["automountServiceAccountToken"] is False, one
        # Baton refuses Services' variables, which have its prefix.
        assert one.pod["enableServiceLinks"] is False, one
        for each in one.containers:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }, f"{one}, {each['name']}"


def test_containers_have_requests_and_memory_limits(every):
    for one in every.workloads:
        for each in one.containers:
            requests, limits = each["resources"]["requests"], each["resources"]["limits"]
            assert requests["cpu"], one
            assert quantity(requests["memory"]) <= quantity(limits["memory"]), one


def test_only_workers_have_gpus_one_per_rank(every):
    (image,) = {each["image"] for one in every.ours for each in one.containers}
    gpus = {one.name: int(one.limit("nvidia.com/gpu") or 0) for one in every.ours}
    on_gpus = image.endswith("gpu")
    ranks = {one.name: one.settings.engine.tensor_parallel_size if on_gpus else 0 for one in every.workers}
    if "encode" in ranks:
        ranks["encode"] = int(on_gpus)  # it has one rank
    assert gpus == {one.name: ranks.get(one.name, 0) for one in every.ours}


# -- the overlays with Baton's own processes


def test_one_namespace_has_each_part_once(manifests):
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests.documents]
    assert len(set(names)) == len(names)
    for one in manifests.documents:
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == NAMESPACE, one["metadata"]
    labels = manifests.named("Namespace", NAMESPACE)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    parts = ["ca", "decode", "encode", "prefill", "redis", "router", "scheduler"]
    assert sorted(one.name for one in manifests.workloads) == parts


def test_selectors_match_their_own_pods(manifests):
    for one in manifests.workloads:
        assert manifests.selected(one.spec["selector"]) == [one.name]
    for service in manifests.of("Service"):
        name, spec = service["metadata"]["name"], service["spec"]
        assert manifests.selected({"matchLabels": spec["selector"]}) == [name]
        ports = manifests.workload(name).ports
        for port in spec["ports"]:
            assert port.get("targetPort", port["port"]) in {*ports, *ports.values()}, name


def test_disruption_budgets(manifests):
    budgets = [one["spec"] for one in manifests.of("PodDisruptionBudget")]
    for one in manifests.ours:
        (budget,) = [each for each in budgets if matches(each["selector"], one.labels)]
        assert manifests.selected(budget["selector"]) == [one.name]
        assert budget.get("maxUnavailable", one.spec["replicas"] - budget.get("minAvailable", 0)) >= 1, one
    for name in ("router", "scheduler"):
        assert manifests.workload(name).spec["replicas"] >= 2


def test_settings_are_valid_and_use_tls(manifests):
    for one in manifests.ours:
        for name in one.environment:
            assert name.startswith(ENV_PREFIX) or name in OTHER_VARIABLES, f"{one}: {name} is not a setting"
        one.settings.scheduler.check_shared()
        identities.check(one.settings)
        assert one.settings.security.tls, one


def test_commands(manifests):
    """Baton is the first process, which gets SIGTERM. Settings are not flags."""
    for one in manifests.ours:
        words = ["ca", "serve", "--listen", "0.0.0.0:7443"] if one.kind == "ca" else [one.name]
        assert [*one.container["command"], *one.container.get("args", [])] == ["baton", *words]
        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("section", "kinds", "own"),
    [
        ("scheduler", ("ca", "scheduler", "router", "worker"), {"address", "metrics_port", "store"}),
        ("engine", ("ca", "router", "worker"), set()),
        ("handoff", ("worker",), set()),
    ],
)
def test_processes_have_the_same_settings(manifests, section, kinds, own):
    among = [one for one in manifests.ours if one.kind in kinds]
    first, *others = [getattr(one.settings, section).model_dump(exclude=own) for one in among]
    assert all(one == first for one in others)


def test_ports_are_listed_and_reachable(manifests):
    for one in manifests.ours:
        handoff = one.handoff_ports if one.kind == "worker" else []
        metrics = [one.metrics_port] if one.kind != "ca" else []
        assert 0 not in metrics, f"{one} serves its metrics on loopback"
        requests = addresses.split(one.listens[0])[1]
        assert set(one.ports.values()) == {requests, *handoff, *metrics}, one
        assert all(addresses.is_wildcard(addresses.split(place)[0]) for place in one.listens), one


def test_names_that_processes_dial_exist(manifests):
    schedulers, redis = manifests.workload("scheduler"), manifests.workload("redis")
    service = manifests.named("Service", schedulers.spec["serviceName"])
    assert service["spec"]["clusterIP"] == "None"  # gives its pods names
    # A scheduler without Redis is better than none.
    assert service["spec"]["publishNotReadyAddresses"]
    port = addresses.split(schedulers.listens[0])[1]
    name = f"{schedulers.name}-{{}}.{service['metadata']['name']}:{port}"
    wanted = ",".join(name.format(number) for number in range(schedulers.spec["replicas"]))
    (join,) = manifests.named("Service", "ca")["spec"]["ports"]
    for one in manifests.ours:
        assert one is schedulers or one.settings.scheduler.address == wanted, one
        store = urlsplit(one.settings.scheduler.store)
        ports = manifests.named("Service", store.hostname or "")["spec"]["ports"]
        assert store.port in [each["port"] for each in ports], one
        assert one.kind == "ca" or one.settings.security.join == f"ca:{join['port']}", one
    assert f"\nport {redis.ports['redis']}\n" in " ".join(redis.container["command"])
    for one in manifests.workers:
        assert one.settings.worker.advertise == FIELDS["status.podIP"]
        assert one.settings.worker.worker_id == FIELDS["metadata.name"]


def test_probes(manifests):
    for one in manifests.workloads:
        probes = {kind: one.container.get(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")}
        assert probes["liveness"], one
        assert probes["readiness"], one
        # The liveness probe would kill it while it loads.
        assert probes["startup"] or one.kind not in ("worker", "router"), one
        for kind, probe in probes.items():
            if probe and one.kind == "router":
                get = probe["httpGet"]
                assert one.ports.get(get["port"], get["port"]) == one.settings.router.port
                assert get["path"] in OPEN  # others need a key
                # /health is 503 without a worker, which is no reason to kill a router.
                assert (get["path"] == "/health") is (kind == "readiness")
            elif probe and one.kind == "ca":
                get = probe["httpGet"]
                assert (get["scheme"], one.ports[get["port"]], get["path"]) == ("HTTPS", 7443, "/ca")
            elif probe and one.is_ours:
                check_grpc_probe(one, kind, probe)


def check_grpc_probe(one, kind, probe):
    """Check a probe with deploy/healthcheck.py."""
    place = addresses.join("127.0.0.1", addresses.split(one.listens[0])[1])
    program, script, asked, *services = probe["exec"]["command"]
    assert (program, script, asked) == ("python", HEALTH_CHECK, place), one
    assert set(services) <= ({WORKER_SERVICE} if one.kind == "worker" else set()), one
    assert one.settings.security.folder, one
    assert probe["timeoutSeconds"] > HEALTH_CHECK_S, one
    patience_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
    if kind == "liveness" and one.kind == "worker":
        assert patience_s > one.settings.worker.drain_timeout_s, f"{one} is killed while it drains"


def test_pods_have_time_to_drain(manifests):
    for one in manifests.ours:
        drain_s = getattr(one.settings, one.kind).drain_timeout_s if one.kind in ("router", "worker") else 0
        pause_s = one.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        # The Service must first stop sending requests.
        assert pause_s >= 3 or one.kind != "router"
        assert one.pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + KUBELET_GRACE_S, one


def test_files_in_settings_are_mounted(manifests):
    router, scheduler, redis = (manifests.workload(name) for name in ("router", "scheduler", "redis"))
    assert router.secret_at(router.settings.router.api_key) in secrets()
    assert scheduler.secret_at(password_file(scheduler.settings.scheduler.store)) in secrets()
    read = set(re.findall(r"/run/secrets/[\w/.-]+", json.dumps(redis.container["command"])))
    assert read
    assert {redis.secret_at(path) for path in read} <= secrets()
    for one in [router, *manifests.workers]:
        model, inside = Path(one.settings.engine.model), dockerfile.workdir()
        if model.is_relative_to(inside):
            assert (ROOT / model.relative_to(inside) / "config.json").is_file(), one
        else:
            claims = [path for path, (_, volume) in one.mounts.items() if "persistentVolumeClaim" in volume]
            assert any(model.is_relative_to(path) for path in claims), one


def test_processes_join_with_a_token_of_their_role(manifests):
    for one in manifests.ours:
        if one.kind != "ca":
            found = one.secret_at(one.settings.security.token)
            assert found in secrets()
            assert found[0] == f"{one.kind}-token"
            assert Path(one.settings.security.folder).is_relative_to(HOME), one


def test_the_cas_key_is_in_memory_and_revocations_are_on_a_volume(manifests):
    ca = manifests.workload("ca")
    folder = ca.settings.security.ca
    _, volume = ca.mounts[folder]
    assert volume["emptyDir"]["medium"] == "Memory"
    mount, kept = ca.mounts[f"{folder}/{KEPT}"]
    assert "persistentVolumeClaim" in kept
    assert not mount.get("readOnly")
    # A new pod on another node could not mount the volume of the old one.
    assert ca.spec["strategy"]["type"] == "Recreate"
    (first,) = [one for one in ca.first if one["name"] == "key"]
    mounts = {one["name"]: one["mountPath"] for one in first["volumeMounts"]}
    assert f"install -m 600 {mounts['secret']}/* {mounts[volume['name']]}" in first["command"]
    assert mounts[volume["name"]] == folder
    assert {("ca", KEY), ("ca", CA_CERTIFICATE), ("ca", TOKENS)} <= secrets()


# -- commands that are run


PASSWORD = 'correct "horse\\ $HOME'


def test_the_redis_command(tmp_path):
    """Run it and its probe on a free port, with a password."""
    assert ("redis", "password") in secrets()
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    port = free_port()

    def here(words):
        text = json.dumps(words).replace("/run/secrets/redis/password", str(password))
        text = text.replace("port 6379", f"port {port}").replace("redis-cli", f"redis-cli -p {port}")
        return json.loads(text)

    one = rendered("cpu").workload("redis").container
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
        assert ran(*probe).returncode == 0
        password.write_text("another")
        assert ran(*probe).returncode != 0
        assert "correct" not in Path(f"/proc/{server.pid}/cmdline").read_text()
        assert Path(f"/proc/{server.pid}/comm").read_text().strip() == "redis-server"  # SIGTERM reaches it
    finally:
        server.kill()
        server.wait(10)


def test_the_copy_of_the_home_needs_no_privileges():
    """A volume belongs to root, and the pod's group may write to it."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can run a command as another user")
    decode = rendered("cpu").workload("decode")
    (first,) = decode.first
    user = decode.pod["securityContext"]["runAsUser"]
    with tempfile.TemporaryDirectory(prefix="baton-home-") as scratch:
        Path(scratch).chmod(0o755)
        home, copied = Path(scratch, "home"), Path(scratch, "copy")
        (home / ".cache").mkdir(parents=True)
        (home / ".cache" / "compiled").write_text("x")
        copied.mkdir()
        copied.chmod(0o2777)
        moved = {f"{HOME}/.": f"{home}/.", first["volumeMounts"][0]["mountPath"]: str(copied)}
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        command = [*as_user, *(moved.get(word, word) for word in first["command"])]
        done = ran(*command)
        assert done.returncode == 0, done.stderr
        assert (copied / ".cache" / "compiled").read_text() == "x"
