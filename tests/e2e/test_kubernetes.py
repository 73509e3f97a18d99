"""deploy/kubernetes over TLS: the cpu overlay with its own commands, variables and probes, in namespaces.

Each pod is a host of harness/netns.py with its Service's names. The documentation's commands make the
Secrets, with a `kubectl` that writes them to folders. Volumes are folders at the manifests' paths, the image
is the checkout at the image's path, and users are the manifests'. The copied home, policies and limits are
not tested here.
"""

import json
import os
import re
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from harness import dockerfile
from harness.deployment import MODEL_NAME
from harness.netns import Network, User, why_not
from harness.support import CALL_S, PYTHON, ROOT, eventually
from tests.deploy.manifests import FIELDS, PAGE, Manifests, render

BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IMAGE = dockerfile.workdir()
START_S = 200.0
# One scheduler and one router are enough. The scheduler has two names.
BEFORE = ("ca", "redis")  # the others would end without these, and a cluster would restart them
AFTER = ("scheduler", "prefill", "decode", "router")
NAMES = {"scheduler": ("scheduler-0", "scheduler-0.scheduler")}
KUBECTL = """#!/bin/sh
[ "$1 $2 $3" = "create secret generic" ] || exit 0
name=$4; mkdir -p "$SECRETS/$name"; shift 4
for word; do case $word in --from-file=*)
  pair=${word#--from-file=}; cp "${pair#*=}" "$SECRETS/$name/${pair%%=*}";;
esac; done
"""


class Cluster:
    """One pod of each workload of an overlay."""

    def __init__(self, network, folder):
        self.network = network
        self.folder = folder
        self.secrets = folder / "secrets"
        self.manifests = Manifests(render("cpu"))
        self.hosts = {}

    def make_secrets(self):
        """Run the documentation's commands for the Secrets."""
        (block,) = [
            one for one in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S) if "ca init" in one
        ]
        tools = self.folder / "tools"
        tools.mkdir()
        (tools / "kubectl").write_text(KUBECTL)
        (tools / "kubectl").chmod(0o755)
        script = "\n".join(line for line in block.splitlines() if not line.startswith("docker "))
        environment = {
            **os.environ,
            "PATH": f"{tools}:{PYTHON.parent}:{BASE_PATH}",
            "SECRETS": str(self.secrets),
        }
        subprocess.run(["bash", "-ec", script], env=environment, cwd=tools, check=True, timeout=CALL_S)

    def start(self, name):
        """Start a pod: its volumes, its init containers except `home`, its container."""
        one = self.manifests.workload(name)
        host_name, service = NAMES.get(name, (name, name))
        user = User(one.pod["securityContext"]["runAsUser"])
        host = self.network.host(host_name, service=service, user=user, shm_mib=512, setup=self._volumes(one))
        self.hosts[name] = host
        eventually(lambda: host.pid, 20, f"{host_name} is there")
        for first in one.pod.get("initContainers", []):
            if first["name"] != "home":
                done = host.run(first["command"], CALL_S, env=self.environment(name))
                assert done.returncode == 0, done.stderr
        with (self.folder / f"{name}.out").open("wb") as out:
            cwd = Path(IMAGE) if one.is_ours else None
            host.start(one.container["command"], env=self.environment(name), cwd=cwd, out=out)

    def environment(self, name):
        """Return a container's variables: the image's and the manifest's, with its address and name."""
        one, host = self.manifests.workload(name), self.hosts[name]
        image = dockerfile.environment(BASE_PATH) if one.is_ours else {"PATH": BASE_PATH}
        if "PYTHONPATH" in os.environ:  # a checkout other than the installed one is tested
            image["PYTHONPATH"] = os.environ["PYTHONPATH"].replace(str(ROOT), IMAGE)
        here = {FIELDS["status.podIP"]: host.address, FIELDS["metadata.name"]: host.name}
        own = {key: here.get(value, value) for key, value in one.environment.items()}
        return {**image, "HOME": f"/home/{dockerfile.user()}", "HOSTNAME": host.name, **own}

    def ready(self, name):
        """Run the manifest's readiness probe."""
        probe = self.manifests.workload(name).container["readinessProbe"]
        if "exec" in probe:
            return self.run(name, *probe["exec"]["command"]).returncode == 0
        get = probe["httpGet"]
        port = self.manifests.workload(name).ports[get["port"]]
        url = f"{get.get('scheme', 'HTTP').lower()}://{self.hosts[name].address}:{port}{get['path']}"
        try:
            with self.network.inside(), urllib.request.urlopen(url, timeout=5, context=_KUBELET) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait_ready(self, name):
        eventually(lambda: self.ready(name), START_S, f"{name} is ready", every_s=1.0)

    def run(self, name, *command):
        """Run a command in a pod, as `kubectl exec` does."""
        cwd = Path(IMAGE) if self.manifests.workload(name).is_ours else None
        return self.hosts[name].run(command, CALL_S, env=self.environment(name), cwd=cwd)

    def ask(self, body):
        """Return the answer to a chat request with the first client key."""
        key = (self.secrets / "router" / "keys").read_text().split()[0]
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        url = f"http://{self.hosts['router'].address}:8000/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with self.network.inside(), urllib.request.urlopen(request, timeout=CALL_S) as answer:
            return json.loads(answer.read())["choices"][0]["message"]["content"]

    def _volumes(self, one):
        """Return shell commands that mount the image and all containers' volumes."""
        lines = ["mount -t tmpfs -o mode=755 tmpfs /home", "mount -t tmpfs -o mode=755 tmpfs /opt"]
        lines += ["mount -t tmpfs -o mode=755 tmpfs /run", "mkdir /opt/volumes"]
        if one.is_ours:
            lines += [f"mkdir {IMAGE}", f"mount --bind '{ROOT}' {IMAGE}"]
        kinds = {volume["name"]: volume for volume in one.pod["volumes"]}
        group = one.pod["securityContext"]["fsGroup"]
        for name, volume in kinds.items():
            lines.append(f"mkdir -m 2777 /opt/volumes/{name}")
            if "secret" in volume:
                files = self.secrets / volume["secret"]["secretName"]
                lines.append(f"install -m 440 -g {group} '{files}'/* /opt/volumes/{name}")
            if claim := volume.get("persistentVolumeClaim"):
                folder = self.folder / "claims" / claim["claimName"]
                lines += [f"mkdir -p -m 2777 '{folder}'", f"mount --bind '{folder}' /opt/volumes/{name}"]
        containers = [one.container, *one.pod.get("initContainers", [])]
        mounts = {(m["mountPath"], m["name"]) for each in containers for m in each["volumeMounts"]}
        for path, name in sorted(mounts):
            if path not in ("/dev/shm", "/tmp"):  # the host has the first; the checkout may be in the second
                lines.append(f"mkdir -p {path} && mount --bind /opt/volumes/{name} {path}")
        return "\n".join(lines)


_KUBELET = ssl.create_default_context()  # does not verify certificates
_KUBELET.check_hostname = False
_KUBELET.verify_mode = ssl.CERT_NONE


pytestmark = pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="set WHOLE_TABLE: all pods start")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if why := why_not():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("kubernetes")
    folder.chmod(0o755)
    with Network(folder) as network:
        made = Cluster(network, folder)
        made.make_secrets()
        for name in BEFORE:
            made.start(name)
            made.wait_ready(name)
        for name in AFTER:
            made.start(name)
        for name in AFTER:
            made.wait_ready(name)
        yield made


@pytest.mark.timeout(400)
def test_a_request_is_answered_over_tls(cluster):
    prompt = "Tell me a long story about a lighthouse, a storm and the people who wait for a ship. " * 6
    message = {"role": "user", "content": prompt}
    body = {"model": MODEL_NAME, "messages": [message], "max_tokens": 16, "temperature": 0}
    assert cluster.ask(body)

    def told():
        done = cluster.run("ca", "baton", "status", "--json")
        assert done.returncode == 0, done.stderr
        status = json.loads(done.stdout)
        return status if status.get("handoffs") else None

    status = eventually(told, CALL_S, "the handoff is reported")
    assert sorted(one["identity"]["worker_id"] for one in status["workers"]) == ["decode", "prefill"]
    (handoff,) = status["handoffs"]
    assert handoff["cost"]["transport"] == "tcp"


@pytest.mark.timeout(100)
def test_clients_without_a_certificate_learn_nothing(cluster):
    plain = "env", "-u", "BATON_SECURITY__TLS", "-u", "BATON_SECURITY__CA"
    done = cluster.run("ca", *plain, "baton", "status", "--scheduler", "scheduler-0.scheduler:7400")
    assert done.returncode != 0
    assert "TLS" in done.stderr
    for name in ("scheduler", "prefill"):
        check = cluster.manifests.workload(name).container["livenessProbe"]["exec"]["command"]
        assert cluster.run(name, *check).returncode == 0
        assert cluster.run(name, "env", "-u", "BATON_SECURITY__FOLDER", *check).returncode != 0
    router = f"http://{cluster.hosts['router'].address}:8000/v1/models"
    with (
        cluster.network.inside(),
        pytest.raises(urllib.error.HTTPError) as refused,
        urllib.request.urlopen(router, timeout=CALL_S),
    ):
        pass
    assert refused.value.code == 401
