"""docker-compose.yml with its own commands, environments and health checks, in namespaces instead of Docker.

Each container is a host of harness/netns.py with its own addresses, host name, process ids (the command is
number 1, as in Docker) and /dev/shm of the size in the file, without privileges, and with a read-only working
folder. The services' names are in /etc/hosts.

The image is the checkout with its .venv (tests/deploy/test_dockerfile.py tests the build steps; those of the
image's user run here), or the machine's redis-server without protected mode, as in Redis's image. This file
implements `depends_on`, health checks and `--scale`. Requests reach the router from the bridge, as through a
published port. `restart` and `stop_grace_period` are not tested. Each engine has one thread, because OpenMP
threads that share a busy core spin.
"""

import json
import os
import re
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from baton import addresses
from baton.handoff import transports
from harness import dockerfile
from harness.deployment import MODEL_NAME
from harness.netns import Network, User, why_not
from harness.support import CALL_S, PATIENCE, ROOT, eventually

COMPOSE = ROOT / "docker-compose.yml"
BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BATON_USER = User(54321)  # the image's user
BUILD_S = 200.0
START_S = 300.0
# PREFILL=2 DECODE=3 in the environment tests five engines, as it does for `docker compose up`.
SCALE = {name: os.environ.get(name, "1") for name in ("PREFILL", "DECODE")}
# Containers share no memory, and their network is trusted.
BETWEEN = next(name for name in transports.usable(None) if name != "shm")
WORKERS, READY = ("prefill", "decode"), "ready on"  # a worker logs it when it begins to serve
PROMPT = "Tell me a long story about a lighthouse, a storm and the people who wait for a ship. " * 6


def services(environment):
    """Return the file's services, with ${NAME:-default} replaced and without the profile `ops`.

    tests/deploy/test_boards.py tests that profile.
    """
    text = re.sub(
        r"\$\{(\w+):-([^}]*)\}", lambda found: environment.get(found[1]) or found[2], COMPOSE.read_text()
    )
    loaded = yaml.safe_load(text)["services"]
    return {name: one for name, one in loaded.items() if "profiles" not in one}


def megabytes(size):
    number, unit = re.fullmatch(r"(\d+)(mb|gb)", size).groups()
    return int(number) << (10 if unit == "gb" else 0)


class Compose:
    """`docker compose up` with a host for each container."""

    def __init__(self, network, folder):
        self.network = network
        self.folder = folder
        self.home = folder / "home"  # home of the image's user, as built
        self.containers = {}
        self.router_port = 0

    def build(self):
        """Run the Dockerfile's RUN instructions of the image's user."""
        self.home.mkdir()
        os.chown(self.home, BATON_USER.number, BATON_USER.number)
        name = "build"
        into = f"mount --bind '{self.home}' /home/{dockerfile.user()}"
        host = self.network.host(name, user=BATON_USER, setup=self._file_system(name, into))
        for line in dockerfile.of_the_user():
            environment = self._environment({"image": "baton"}, name)
            done = host.run(["sh", "-ec", f"ENGINE=cpu; {line}"], BUILD_S, env=environment, cwd=ROOT)
            assert done.returncode == 0, f"RUN {line}\n{done.stdout}\n{done.stderr}"
        host.kill()

    def up(self, **environment):
        """Start missing containers, each after the services that it depends on."""
        wanted = services(environment)
        while waiting := [name for name, one in wanted.items() if len(self.of(name)) < self.replicas(one)]:
            name = next(name for name in waiting if not set(depends(wanted[name])).intersection(waiting))
            for other, condition in depends(wanted[name]).items():
                if condition == "service_healthy":
                    self.wait_healthy(other, wanted[other], 30)
            for number in range(len(self.of(name)) + 1, self.replicas(wanted[name]) + 1):
                self._start(name, number, wanted[name])

    def of(self, service):
        return self.containers.get(service, [])

    @staticmethod
    def replicas(service):
        return int(service.get("deploy", {}).get("replicas", 1))

    def wait_healthy(self, name, service, timeout_s):
        """Wait until the file's health check succeeds in each container."""
        check = service["healthcheck"]
        assert check["test"][0] == "CMD"
        for host in self.of(name):

            def healthy(host=host):
                assert host.process.poll() is None, f"{host.name} ended:\n{host.text[-3000:]}"
                if name in WORKERS and READY not in host.text:
                    return False
                environment = self._environment(service, host.name)
                done = host.run(check["test"][1:], 60, env=environment, cwd=ROOT)
                return done.returncode == 0

            # Most checks start a Python process, so a worker's log is read first.
            eventually(healthy, timeout_s, f"{host.name} is healthy", every_s=1.0)

    def ask(self, path, body=None):
        """Send a request to the router's container from the bridge."""
        url = f"http://{self.of('router')[0].address}:{self.router_port}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with self.network.inside(), urllib.request.urlopen(request, timeout=CALL_S) as answer:
            return json.loads(answer.read())

    def baton(self, service, *command):
        """Run `docker compose exec SERVICE baton COMMAND`."""
        host = self.of(service)[0]
        environment = self._environment(services({})[service], host.name)
        return host.run(["baton", *command], 60, env=environment, cwd=ROOT)

    def status(self):
        """Run `docker compose exec router baton status --json`."""
        done = self.baton("router", "status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def _start(self, service, number, spec):
        name = f"{service}-{number}"
        ours = spec["image"] == "baton"
        host = self.network.host(
            name,
            spec["command"] if ours else [*spec["command"], "--protected-mode", "no"],
            service=service,
            env=self._environment(spec, name),
            cwd=ROOT if ours else None,
            user=BATON_USER,
            shm_mib=megabytes(spec.get("shm_size", "64mb")),
            setup=self._file_system(name, f"cp -a '{self.home}/.' /home/{dockerfile.user()}"),
        )
        self.containers.setdefault(service, []).append(host)

    def _environment(self, spec, name):
        """Return a container's variables: the image's, Docker's and the file's."""
        image = dockerfile.environment(BASE_PATH) if spec["image"] == "baton" else {"PATH": BASE_PATH}
        image = {key: value.replace(dockerfile.workdir(), str(ROOT)) for key, value in image.items()}
        if "PYTHONPATH" in os.environ:  # a checkout other than the installed one is tested
            image["PYTHONPATH"] = os.environ["PYTHONPATH"]
        image["OMP_NUM_THREADS"] = "1"
        own = {key: str(value) for key, value in spec.get("environment", {}).items()}
        return {**image, "HOSTNAME": name, "HOME": f"/home/{dockerfile.user()}", **own}

    def _file_system(self, name, fill_home):
        """Return shell commands that set up the user's home and account and a read-only working folder."""
        user, number = dockerfile.user(), BATON_USER.number
        accounts = self.folder / f"{name}.passwd"
        accounts.write_text(Path("/etc/passwd").read_text() + f"{user}:x:{number}:{number}::/home/{user}:\n")
        return f"""
mount --bind '{accounts}' /etc/passwd
mount -t tmpfs -o mode=755 tmpfs /home
mkdir /home/{user}
chown {number}:{number} /home/{user}
{fill_home}
mount --bind '{ROOT}' '{ROOT}'
mount -o remount,bind,ro '{ROOT}'
"""


def depends(service):
    found = service.get("depends_on", {})
    if isinstance(found, list):
        return dict.fromkeys(found, "service_started")
    return {name: one["condition"] for name, one in found.items()}


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """Start all services at the same time, scaled by SCALE, and wait until they are healthy."""
    if why := why_not():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("compose")
    with Network(folder) as network:
        compose = Compose(network, folder)
        compose.build()
        compose.up(**SCALE)
        wanted = services(SCALE)
        address, published, port = wanted["router"]["ports"][0].split(":")
        assert (address, int(published)) == ("127.0.0.1", 8000)
        compose.router_port = int(port)
        for name, one in wanted.items():
            compose.wait_healthy(name, one, START_S)
        yield compose


def chat(compose, content):
    message = {"role": "user", "content": content}
    body = {"model": MODEL_NAME, "messages": [message], "max_tokens": 16, "temperature": 0}
    return compose.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]


@pytest.mark.timeout(600)
def test_a_chat_request_passes_through_all_containers(composed):
    assert chat(composed, PROMPT)
    eventually(lambda: composed.status().get("handoffs"), CALL_S, "the handoff is reported")
    status = composed.status()
    roles = {one["identity"]["worker_id"]: one["identity"]["role"] for one in status["workers"]}
    # A part that listens on all addresses advertises one of the container's.
    hosts = [*composed.of("prefill"), *composed.of("decode")]
    found = {one["identity"]["address"] for one in status["workers"]}
    for host in hosts:
        assert len(found & {f"{host.address}:7401", f"[{host.address6}]:7401"}) == 1
    assert Counter(roles.values()) == {f"ROLE_{name}": int(number) for name, number in SCALE.items()}
    assert status["store"].startswith("redis")
    (handoff,) = status["handoffs"]
    by, to = roles[handoff["prefill_worker_id"]], roles[handoff["decode_worker_id"]]
    assert (by, to) == ("ROLE_PREFILL", "ROLE_DECODE")
    assert handoff["cost"]["transport"] == BETWEEN
    assert int(handoff["cost"]["handoff_bytes"]) > 0


@pytest.mark.skipif(set(SCALE.values()) == {"1"}, reason="one worker of each role: set PREFILL and DECODE")
@pytest.mark.timeout(200)
def test_each_worker_is_used(composed):
    def all_used():
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(lambda number: chat(composed, f"{number}. {PROMPT}"), range(6)))
        moved = [one for one in composed.status()["handoffs"] if one["cost"].get("transport") == BETWEEN]
        by, to = ({one[f"{role}_worker_id"] for one in moved} for role in ("prefill", "decode"))
        return [len(by), len(to)] == [int(number) for number in SCALE.values()]

    eventually(all_used, 100, "each worker has served requests")


@pytest.mark.timeout(200)
def test_each_process_is_found_by_its_metrics(composed):
    scheduler, router = composed.of("scheduler")[0], composed.of("router")[0]
    targets = json.loads(read(composed, f"http://{scheduler.address}:9400/targets"))
    roles = sorted(one["labels"]["role"] for one in targets)
    workers = [role for role in WORKERS for _ in composed.of(role)]
    assert roles == sorted([*workers, "router", "scheduler"])
    for one in targets:
        (address,) = one["targets"]
        assert "process_cpu_seconds_total" in read(composed, f"http://{address}/metrics"), one
    all_of_them = read(composed, f"http://{router.address}:{composed.router_port}/metrics?all")
    up = re.findall(r"^baton_federation_up\{.*\} (\d)$", all_of_them, re.MULTILINE)
    assert up == ["1"] * len(roles), all_of_them[-2000:]


def read(compose, url):
    with compose.network.inside(), urllib.request.urlopen(url, timeout=CALL_S) as answer:
        return str(answer.read().decode())


@pytest.mark.timeout(200)
def test_a_stopped_container_leaves_in_order(composed):
    """`docker stop` signals the container's first process, which is the command. Others take its work."""
    stopped = composed.of("decode")[-1]
    stopped.terminate()
    assert stopped.process.wait(60 * PATIENCE) == 0, stopped.text
    workers = [one["identity"]["address"] for one in composed.status()["workers"]]
    assert not any(addresses.split(address)[0] in (stopped.address, stopped.address6) for address in workers)
    assert chat(composed, "Hello")


def test_what_the_image_prepares_is_used(composed):
    """Kernels in the image's cache are not compiled again."""
    made = {path.relative_to(composed.home) for path in composed.home.rglob("*") if path.is_file()}
    assert any(path.suffix == ".nbi" for path in made)
    host = composed.of("prefill")[0]
    home = f"/home/{dockerfile.user()}"
    found = host.run(["find", home, "-type", "f", "-printf", "%P\\n"], 20).stdout.split()
    kinds = (".nbi", ".nbc")
    assert {path for path in map(Path, found) if path.suffix in kinds} == {
        path for path in made if path.suffix in kinds
    }


def test_nothing_tries_to_write_beside_the_program(composed):
    for hosts in composed.containers.values():
        for host in hosts:
            assert "Read-only file system" not in host.text, host.text
            assert "Permission denied" not in host.text, host.text
