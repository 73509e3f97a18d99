"""`baton ray` on one machine: it starts its own Ray, takes commands from a second terminal, and cleans up."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import yaml

from harness import ray_forks
from harness.ray_head import RAY, ray_folder
from harness.scheduling import RedisServer
from harness.support import (
    BATON,
    CALL_S,
    INTERRUPTIBLE,
    PYTHON,
    ROOT,
    eventually,
    family,
    free_port,
    gone,
    ran,
    running,
    segments,
)

START_S = 120.0
PAUSE_S = 0.3  # between a client's requests
# Ray's token authentication, with a token that is not written to the home folder.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-this-test-alone-and-long-enough"}
DEPLOY = """
import sys
from baton.ray import deploy
with deploy(sys.argv[1], tell=lambda *said: print(*said, flush=True)) as deployment:
    print("READY", deployment.urls, flush=True)
"""


@dataclass(frozen=True)
class Local:
    """A folder with cluster.yaml, and variables that keep it apart from other Ray clusters."""

    folder: Path
    ray: Path
    port: int

    @property
    def environment(self):
        own = {"RAY_TMPDIR": str(self.ray), "BATON_SECURITY__CA": str(self.folder / "ca")}
        return {**os.environ, **RAY, **TOKEN, **ray_forks.environment(self.ray), **own}

    @property
    def file(self):
        return str(self.folder / "cluster.yaml")

    def write(self, **more):
        """Write deploy/ray/laptop.yaml with room for three workers on two cores."""
        found = yaml.safe_load((ROOT / "deploy/ray/laptop.yaml").read_text())
        for role in ("prefill", "decode"):
            found[f"{role}_config"]["placement_group_config"] = {"bundles": [{"CPU": 0.5}]}
        own = {"router": {"port": self.port}, "handoff": {"staging_mib": 64}}
        for section, values in (own | more).items():
            found[section] = own.get(section, {}) | values
        Path(self.file).write_text(yaml.safe_dump(found))

    def until(self, text, *command):
        """Run a command during the block, which begins when it has printed this text."""
        options = {"env": self.environment, "cwd": ROOT}
        return running(command, lambda: text in self.text, START_S, self.output, **options)

    @property
    def address(self):
        """This Ray's address; without RAY_ADDRESS a command may find another Ray on the machine."""
        return (self.folder / "address").read_text()

    def note_address(self, process):
        words = [word for one in family(process.pid) for word in one.cmdline()]
        found = {word.partition("=")[2] for word in words if word.startswith("--gcs-address=")}
        (self.folder / "address").write_text(found.pop())
        assert not found

    def processes(self, process):
        """Return the family of this process and that of each `baton node`, which the zygote forked."""
        return [each for one in (process, *ray_forks.nodes(self.ray)) for each in family(one.pid)]

    @property
    def output(self):
        return self.folder / "output"

    @property
    def text(self):
        return self.output.read_text()

    def baton(self, *command):
        """Run `baton ray`, as from a second terminal."""
        own = {**self.environment, "RAY_ADDRESS": self.address}
        done = ran(BATON, "ray", *command, env=own, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def parts(self):
        told = json.loads(self.baton("status", "--json"))
        return {part["name"]: part["state"] for part in told["parts"]}


@pytest.fixture
def local(tmp_path):
    with ray_folder() as ray:
        yield Local(tmp_path, ray, free_port())


def nothing_is_left(processes):
    """Return whether these processes have ended and their shared memory is gone."""
    return gone(processes) and not segments(processes)


def answer(client):
    """Stream a greedy answer and return its text."""
    asked = {"model": "baton-demo", "prompt": "The cat sat on the mat. " * 4, "max_tokens": 100}
    stream = client.completions.create(**asked, temperature=0, stream=True, extra_body={"ignore_eos": True})
    return "".join(chunk.choices[0].text for chunk in stream)


@pytest.mark.timeout(700)
def test_up_scale_and_down_from_a_second_terminal(local):
    """Use Redis as the store. No stream fails while a worker joins and leaves."""
    redis = RedisServer(local.folder)
    local.write(scheduler={"store": redis.url})
    with redis, local.until("\nReady.", BATON, "ray", "up", local.file) as up:
        local.note_address(up)
        url = f"http://127.0.0.1:{local.port}/v1"
        assert url in local.text
        with openai.OpenAI(base_url=url, api_key="none", timeout=CALL_S, max_retries=0) as client:
            expected, stop = answer(client), threading.Event()

            def ask():
                found = []
                while not stop.wait(PAUSE_S):
                    found.append(answer(client))
                return found

            with ThreadPoolExecutor(2) as pool:
                asking = [pool.submit(ask) for _ in range(2)]
                try:
                    assert "ordered: decode=2" in local.baton("scale", "decode=2")
                    eventually(lambda: "decode-1     ready: " in local.text, 90, "a second worker is ready")
                    everything = local.processes(up)
                    local.baton("scale", "decode=1")
                    eventually(lambda: "decode-1     has left" in local.text, 60, "it has left")
                finally:
                    stop.set()
                answers = [text for one in asking for text in one.result(CALL_S)]
            assert len(answers) > 2
            assert set(answers) == {expected}
        assert local.parts() == {"prefill-0": "ready", "decode-0": "ready", "router-0": "ready"}
        assert "nothing is left" in local.baton("down")
        assert up.wait(CALL_S) == 0, local.text
    assert "stopped: nothing is left on the cluster" in local.text
    eventually(lambda: nothing_is_left(everything), 20, "processes and shared memory are gone")


@pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="set WHOLE_TABLE: Ray starts once more")
@pytest.mark.timeout(300)
def test_ctrl_c_ends_deploy_as_it_starts(local):
    """Ctrl-C acts like an exception in the caller's block, as in a user's program."""
    local.write()
    with local.until("prefill-0 started", *INTERRUPTIBLE, PYTHON, "-c", DEPLOY, local.file) as process:
        everything = local.processes(process)
        assert len(everything) > 8  # processes of Ray, the keeper, baton node and its parts
        process.send_signal(signal.SIGINT)
        assert process.wait(CALL_S) != 0
    assert "KeyboardInterrupt" in local.text
    assert "READY" not in local.text
    eventually(lambda: nothing_is_left(everything), 20, "processes and shared memory are gone")
