"""docker-compose.yml, without Docker: each service's command runs as a plain process with its environment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.e2e.deployment import MODEL_NAME, status_of
from tests.support import ROOT, eventually, free_port

COMPOSE = ROOT / "docker-compose.yml"
ORDER = ["redis", "scheduler", "prefill", "decode", "router"]


def services() -> dict[str, dict[str, Any]]:
    """The compose file's services, with ${NAME:-default} replaced by the default, as compose does."""
    text = re.sub(
        r"\$\{(\w+):-([^}]*)\}", lambda found: os.environ.get(found[1], found[2]), COMPOSE.read_text()
    )
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return loaded


class Network:
    """Stands in for compose's network: every service's name and port becomes a loopback port of its own."""

    def __init__(self) -> None:
        self.ports: dict[tuple[str, str], int] = {}

    def port(self, service: str, port: str) -> int:
        return self.ports.setdefault((service, port), free_port())

    def here(self, service: str, value: str) -> str:
        """`scheduler:7400` and, inside the scheduler, `0.0.0.0:7400` become the same loopback address."""

        def replace(found: re.Match[str]) -> str:
            name = service if found["host"] in ("0.0.0.0", "127.0.0.1") else found["host"]
            return f"127.0.0.1:{self.port(name, found['port'])}"

        return re.sub(rf"(?P<host>{'|'.join(ORDER)}|0\.0\.0\.0|127\.0\.0\.1):(?P<port>\d+)", replace, value)


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Network]]:
    """All services of the file, started in order; yields the router's port."""
    folder = tmp_path_factory.mktemp("compose")
    network = Network()
    running: list[subprocess.Popen[bytes]] = []
    router_port = network.port("router", "8000")
    try:
        for name in ORDER:
            service = services()[name]
            command = list(service["command"])
            environment = {
                key: network.here(name, str(value)) for key, value in service.get("environment", {}).items()
            }
            if name == "redis":
                command += ["--port", str(network.port("redis", "6379")), "--bind", "127.0.0.1"]
            if name == "router":
                environment |= {"BATON_ROUTER__HOST": "127.0.0.1", "BATON_ROUTER__PORT": str(router_port)}
            if name in ("prefill", "decode"):
                environment["BATON_WORKER__METRICS_PORT"] = str(free_port())
            with (folder / f"{name}.log").open("wb") as log:
                path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
                running.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **environment, "PATH": path},
                        cwd=ROOT,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

        def ready() -> bool:
            for name, process in zip(ORDER, running, strict=True):
                assert process.poll() is None, f"{name} ended:\n{_text(folder, name)}"
            return status_of(f"http://127.0.0.1:{router_port}/health") == 200

        eventually(ready, 120, "the router is healthy")
        yield router_port, network
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def _text(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text(errors="replace")[-3000:]


@pytest.mark.timeout(200)
def test_a_chat_request_passes_through_all_services(composed: tuple[int, Network]) -> None:
    router_port, _ = composed
    with openai.OpenAI(base_url=f"http://127.0.0.1:{router_port}/v1", api_key="none", timeout=30) as client:
        answer = client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=16
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 1
    assert answer.choices[0].message.content


def test_the_health_checks_pass(composed: tuple[int, Network]) -> None:
    router_port, network = composed
    for name, service in services().items():
        check = service.get("healthcheck")
        assert check, f"{name} has no health check"
        command = [network.here(name, part) for part in check["test"][1:]]
        if name == "redis":
            command += ["-p", str(network.port("redis", "6379"))]
            command = [command[0], *command[2:], command[1]]
        if name == "router":
            command = [
                part.replace("127.0.0.1:" + str(network.port("router", "8000")), f"127.0.0.1:{router_port}")
                for part in command
            ]
        path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}

        def passes(command: list[str] = command, environment: dict[str, str] = environment) -> bool:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, timeout=20, check=False
            )
            return done.returncode == 0

        # Asked again, as Docker does: a worker that a busy machine kept from its heartbeats registers anew.
        eventually(passes, 20, f"{name} passes {command}")


def test_each_service_can_be_scaled_by_a_number() -> None:
    text = COMPOSE.read_text()
    assert "${PREFILL:-1}" in text
    assert "${DECODE:-1}" in text
    for name in ORDER[1:]:
        assert services()[name]["build"]["dockerfile"] == "deploy/Dockerfile"
    assert (ROOT / "deploy" / "Dockerfile").exists()
