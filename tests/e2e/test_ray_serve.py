"""`baton.ray:build_pd_openai_app` served by a real local Ray Serve, and called by OpenAI's client."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import openai
import psutil
import pytest

from harness.deployment import ENGINE, MODEL_NAME
from harness.support import BATON, CALL_S, PYTHON, ROOT, eventually, free_port

# Of `ray[serve]`, which is more than the pinned `ray`.
NEEDED = ("grpc_reflection", "opencensus", "smart_open", "aiohttp_cors")
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED),
    reason="needs pip install 'ray[default,serve]'",
)

START_S = 150.0
SERVE = """
import sys
import ray
from ray import serve
from baton.ray import build_pd_openai_app

def side(**more):
    # As Ray's own users write it, with what Baton does itself.
    engine = {**ENGINE, "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}
    source = engine.pop("model")
    return {
        "model_loading_config": {"model_id": engine.pop("served_model_name"), "model_source": source},
        "engine_kwargs": engine,
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        **more,
    }

app = build_pd_openai_app({
    "prefill_config": side(deployment_config={"num_replicas": 1}),
    "decode_config": side(deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}),
    "handoff": {"staging_mib": 64},
    "security": {"ca": CA},
})
ray.init(num_cpus=8, include_dashboard=False, object_store_memory=80_000_000)
serve.start(http_options={"host": "127.0.0.1", "port": PORT})
serve.run(app)
meeting = serve.get_deployment_handle("Scheduler", "default").meet.remote("router").result()
print(f"SERVING {meeting.address}.", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
print("ENDED", flush=True)
"""


class Served(NamedTuple):
    """The application, seen from outside."""

    url: str
    scheduler: str  # host:port
    ca: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    engine = ENGINE | {"max_num_seqs": 4}
    script, log = folder / "app.py", folder / "app.log"
    ca = folder / "ca"
    script.write_text(f"ENGINE, PORT, CA = {engine!r}, {port}, {str(ca)!r}\n{textwrap.dedent(SERVE)}")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [PYTHON, script],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
        )

    def serving() -> re.Match[str] | None:
        assert process.poll() is None, log.read_text()[-5000:]
        return re.search(r"SERVING (\S+:\d+)\.", log.read_text())

    try:
        found = eventually(serving, START_S, f"Serve runs the application; {log}")
        yield Served(f"http://127.0.0.1:{port}/v1", found[1], ca)
        family = psutil.Process(process.pid).children(recursive=True)
        process.communicate(timeout=CALL_S)  # which closes its stdin
        assert "ENDED" in log.read_text()
        eventually(lambda: not any(one.is_running() for one in family), 20, "nothing is left")
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.timeout(400)
def test_openais_client_is_answered(served: Served) -> None:
    client = openai.OpenAI(base_url=served.url, api_key="none", timeout=CALL_S, max_retries=0)
    with client:
        assert [one.id for one in client.models.list()] == [MODEL_NAME]
        messages = [{"role": "user", "content": "Hello"}]
        whole = client.chat.completions.create(
            model=MODEL_NAME,
            messages=messages,
            max_tokens=8,
            temperature=0,  # type: ignore[arg-type]
        )
        stream = client.chat.completions.create(
            model=MODEL_NAME,
            messages=messages,
            max_tokens=8,
            temperature=0,
            stream=True,  # type: ignore[arg-type]
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert whole.choices[0].message.content == "".join(pieces)
        assert len([piece for piece in pieces if piece]) > 1
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=-1)


@pytest.mark.timeout(100)
def test_the_router_can_be_asked_itself(served: Served) -> None:
    """Each answer names the router that gave it, for clients that spare themselves the proxy."""
    with openai.OpenAI(base_url=served.url, api_key="none", timeout=CALL_S) as client:
        url = client.models.with_raw_response.list().headers["x-baton-router"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=CALL_S) as client:
        assert client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=4).choices[0].text


@pytest.mark.timeout(100)
def test_the_parts_speak_tls(served: Served) -> None:
    """Who has the CA's folder is told of the workers; who speaks plain text is told that this is TLS."""

    def status(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [str(BATON), "status", "--scheduler", served.scheduler, *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=CALL_S, check=False)

    done = status("--secure", "--security-ca", str(served.ca))
    assert done.returncode == 0, done.stderr
    assert "prefill-" in done.stdout
    assert "decode-" in done.stdout
    done = status()
    assert done.returncode != 0, done.stdout
    assert "TLS" in done.stderr
