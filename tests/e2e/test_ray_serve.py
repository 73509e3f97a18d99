"""A running Ray cluster: an application of Ray Serve, a start that fails, and the workers' GPUs.

The application is the serveConfigV2 of deploy/kubernetes/overlays/ray, with this machine's paths and shorter
intervals. `WHOLE_TABLE=1 make test ARGS=tests/e2e/test_ray_serve.py` tests autoscaling, too.
"""

import json
import os
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import openai
import psutil
import pytest
import yaml

from baton import addresses
from harness import zygote
from harness.deployment import MODEL_NAME
from harness.ray_head import RayHead, ray_head
from harness.support import BATON, CALL_S, INTERRUPTIBLE, PYTHON, ROOT, eventually, free_port, gone, ran
from tests.deploy.manifests import RayManifests, in_checkout, render

START_S = 150.0
KEY = "a-clients-key"
QUICK = {"health_check_period_s": 1, "health_check_timeout_s": 20}
SCALING = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0}
SCALING |= {"downscale_delay_s": 4, "metrics_interval_s": 0.5, "look_back_period_s": 3}
STREAMS = 2
PAUSE_S = 0.3  # between a client's requests
TOKENS = 160
# Each worker's GPU. Ray assigns GPUs that are declared but do not exist.
VISIBLE = """
import json, sys
import ray
from baton.services.ray import cluster
cluster.connect(sys.argv[1])
bundles = [{"CPU": 0.1, "GPU": 1.0}] * 2
groups = [cluster.reserve(f"worker-{at}", [bundle], {}) for at, bundle in enumerate(bundles)]
ray.get([group.ready() for group in groups], timeout=float(sys.argv[2]))
asked = [cluster.visible(group, bundle) for group, bundle in zip(groups, bundles)]
print(json.dumps(cluster.get(asked, float(sys.argv[2]))))
cluster.disconnect()
"""


class Served(NamedTuple):
    """The running application."""

    url: str
    head: RayHead
    ca: Path

    def client(self, url="", key=KEY):
        return openai.OpenAI(base_url=url or self.url, api_key=key, timeout=CALL_S, max_retries=0)

    def parts(self, role):
        """Return a role's running parts by name."""
        return {name: one for name, one in self.head.parts().items() if name.startswith(f"{role}-")}

    def scheduler(self):
        (process,) = self.parts("scheduler").values()
        connections = process.net_connections("tcp")
        # Other parts are connected to its port; nothing is connected to its metrics port.
        used = {one.laddr.port for one in connections if one.status == psutil.CONN_ESTABLISHED}
        listening = [one.laddr for one in connections if one.status == psutil.CONN_LISTEN]
        (place,) = [place for place in listening if place.port in used]
        return addresses.join(place.ip, place.port)


def configuration(port, folder):
    """Return the overlay's configuration of Serve, for this machine."""
    found = RayManifests(render("ray")).serve
    found["http_options"] = {"host": "127.0.0.1", "port": port}
    keys = folder / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    args = found["applications"][0]["args"] = in_checkout(found["applications"][0]["args"])
    args["router"]["api_key"] = f"file:{keys}"
    args |= {"security": {"ca": str(folder / "ca")}, "handoff": {"staging_mib": 64}}
    args["ingress_deployment_config"] = {"num_replicas": 1, **QUICK}
    args["prefill_config"]["deployment_config"] |= QUICK
    args["decode_config"]["deployment_config"] = {"autoscaling_config": SCALING, **QUICK}
    # Users of Ray's own disaggregation have these; Baton ignores them.
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    for role in ("prefill", "decode"):
        args[f"{role}_config"]["engine_kwargs"]["kv_transfer_config"] = connector
        args[f"{role}_config"]["log_engine_metrics"] = True
    return found


@pytest.fixture(scope="module")
def head():
    with ray_head("--num-cpus=4", "--num-gpus=2") as one:
        yield one
        family = psutil.Process(one.process.pid).children(recursive=True)
    eventually(lambda: gone(family), 20, "nothing is left")


@pytest.fixture(scope="module")
def served(head, tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    file, log = folder / "serve.yaml", folder / "serve.log"
    file.write_text(yaml.safe_dump(configuration(port, folder)))
    serve = [str(PYTHON.with_name("serve")), "run", str(file), "--address", head.address]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*INTERRUPTIBLE, *serve], stdout=out, stderr=subprocess.STDOUT, env=head.environment, cwd=folder
        )
    one = Served(f"http://127.0.0.1:{port}/v1", head, folder / "ca")

    def serving():
        text = log.read_text()
        assert process.poll() is None, text[-5000:]
        assert "DEPLOY_FAILED" not in text, text[-5000:]
        try:
            with one.client() as client:
                return bool(client.models.list().data)
        except openai.APIError:
            return False

    try:
        eventually(serving, START_S, f"Serve runs the application; {log}", every_s=1.0)
        yield one
        process.send_signal(signal.SIGINT)
        process.wait(CALL_S)
        eventually(lambda: not any(map(one.parts, ("decode", "prefill"))), 20, "no worker is left")
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.timeout(700)
def test_openais_client_is_answered(served):
    with served.client() as client:
        assert [one.id for one in client.models.list()] == [MODEL_NAME]
        messages = [{"role": "user", "content": "Hello"}]
        asked = {"model": MODEL_NAME, "messages": messages, "max_tokens": 8, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(**asked, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert whole.choices[0].message.content == "".join(pieces)
        long = client.completions.create(
            model=MODEL_NAME, prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        assert sum(bool(chunk.choices[0].text) for chunk in long) > 1
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=-1)
    with served.client(key="another") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.timeout(100)
def test_the_router_can_be_asked_itself(served):
    """Each answer names its router, so that clients can bypass Serve's proxy."""
    with served.client() as client:
        url = client.models.with_raw_response.list().headers["x-baton-router"]
    with served.client(f"{url}/v1") as client:
        assert client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=4).choices[0].text


@pytest.mark.timeout(200)
def test_the_parts_speak_tls(served):
    """Clients with the CA's folder reach the scheduler; plain-text clients are told to use TLS."""
    scheduler = served.scheduler()

    def status(*flags):
        return zygote.shared().command("status", "--scheduler", scheduler, *flags)

    done = status("--secure", "--security-ca", str(served.ca))
    assert done.returncode == 0, done.stderr
    assert "prefill-" in done.stdout
    assert "decode-" in done.stdout
    done = status()
    assert done.returncode != 0, done.stdout
    assert "TLS" in done.stderr


def answer(client):
    """Stream an answer and return its text and number of tokens."""
    stream = client.completions.create(
        model=MODEL_NAME,
        prompt="The cat sat on the mat. " * 4,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, tokens = "", 0
    for chunk in stream:
        text += chunk.choices[0].text if chunk.choices else ""
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return text, tokens


@pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="takes longer than all else here: WHOLE_TABLE=1")
@pytest.mark.timeout(700)
def test_decode_workers_follow_the_streams_and_one_given_up_is_replaced(served):
    """Two streams add a second worker; one is killed until it is replaced; then one worker is left."""
    with served.client() as client, ThreadPoolExecutor(STREAMS) as pool:
        expected = answer(client)
        assert expected[1] == TOKENS
        few, none = threading.Event(), threading.Event()

        def ask(stop):
            found = []
            while not stop.wait(PAUSE_S):
                found.append(answer(client))
            return found

        (first,) = served.parts("decode")
        asking = [pool.submit(ask, none if number == 0 else few) for number in range(STREAMS)]
        try:
            eventually(lambda: len(served.parts("decode")) == 2, 60, "a second decode worker runs")

            def replaced():
                found = served.parts("decode")
                if first in found:
                    found[first].kill()
                return len(found) == 2 and first not in found

            eventually(replaced, 90, f"{first} is replaced", every_s=0.2)
            few.set()  # stops one client
            eventually(lambda: len(served.parts("decode")) == 1, 90, "one decode worker is left")
        finally:
            few.set()
            none.set()
        answers = [each for one in asking for each in one.result(CALL_S)]
    print(f"{len(answers)} answers")
    assert len(answers) > STREAMS
    assert set(answers) == {expected}


@pytest.mark.timeout(200)
def test_workers_of_one_node_see_different_gpus(head):
    command = (PYTHON, "-c", VISIBLE, head.address, CALL_S / 2)
    done = ran(*command, env=head.environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = [one["CUDA_VISIBLE_DEVICES"] for one in json.loads(done.stdout.splitlines()[-1])]
    assert sorted(found) == ["0", "1"]


@pytest.mark.timeout(200)
def test_a_port_that_another_has_ends_a_start(head, tmp_path):
    """The other server, such as a `baton up`, must not pass for the deployment's router."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = yaml.safe_load((ROOT / "deploy/ray/laptop.yaml").read_text())
        found |= {"router": {"host": "127.0.0.1", "port": port}, "security": {"ca": str(tmp_path / "ca")}}
        file = tmp_path / "cluster.yaml"
        file.write_text(yaml.safe_dump(found))
        up = (BATON, "ray", "up", file, "--address", head.address)
        done = ran(*up, env=head.environment, cwd=ROOT)
    assert done.returncode == 1, done
    assert f"router.port: cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "Ready." not in done.stdout
