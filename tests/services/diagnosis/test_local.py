import importlib.util
import os
import socket
import subprocess
import sys

import pytest

from baton.handoff.memory import segments
from baton.services.config import load
from baton.services.diagnosis import local
from baton.services.diagnosis.finding import Verdict
from harness.architectures.registry import VISIONS
from harness.support import free_port, free_ports


def found(area, **given):
    settings = load({"scheduler": {"address": f"127.0.0.1:{free_port()}"}, **given})
    return {one.subject: one for one in local.findings(settings, runs=False) if one.area == area}


def test_a_configured_port_that_a_foreign_process_holds_is_a_problem():
    port = free_port()
    code = f"import socket, sys; s = socket.create_server(('127.0.0.1', {port})); "
    code += "print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as stranger:
        stranger.stdout.readline()
        one = found("ports", router={"port": port})["router.port"]
        stranger.kill()
    assert one.verdict is Verdict.WRONG
    assert f"held by process {stranger.pid}" in one.what
    assert "router.port" in one.todo


@pytest.mark.parametrize(
    ("command", "baton"),
    [
        (["baton router"], True),
        (["/x/.venv/bin/python", "/x/.venv/bin/baton", "up"], True),
        (["python", "-m", "baton.services.cli"], True),
        (["/home/me/baton-fresh/.venv/bin/python", "-c", "serve()"], False),
        (["/opt/baton/bin/redis-server", "*:6379"], False),
    ],
)
def test_a_process_of_ours_is_known_by_its_title_or_program(command, baton):
    assert local._is_baton(command) is baton


def test_ports_of_the_configuration_that_are_free_are_ok():
    port = free_port()
    ports = found("ports", router={"port": port}, handoff={"listen": f"127.0.0.1:{free_ports()}"})
    assert ports["router.port"].what == f"127.0.0.1:{port} is free"
    assert {one.verdict for one in ports.values()} == {Verdict.OK}
    assert set(ports) == {"router.port", "scheduler.address", "handoff.listen"}


def test_another_machines_address_is_not_judged():
    assert found("ports", scheduler={"address": "192.0.2.7:7400"}, router={"port": 0}) == {}


def test_a_missing_model_is_a_problem(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    missing = str(tmp_path / "missing")
    assert found("model", engine={"model": missing})[missing].verdict is Verdict.WRONG


def test_packages_that_a_model_with_a_vision_tower_lacks_are_a_problem(monkeypatch):
    model = VISIONS["smolvlm"]
    folder = str(model.target(model.checkpoint()))
    assert found("model", engine={"model": folder})[folder].verdict is Verdict.OK
    here = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "num2words" else here(name))
    lacking = found("model", engine={"model": folder})[folder]
    assert lacking.verdict is Verdict.WRONG
    assert "num2words is not installed" in lacking.what
    assert "constraints.txt" in lacking.todo


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_an_unreadable_model_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"0" * 8)
    assert found("model", engine={"model": str(tmp_path)})[str(tmp_path)].verdict is Verdict.OK
    (tmp_path / "model.safetensors").chmod(0)
    real = os.access
    # access(2) checks the real user, which cannot be changed back, so check as one without root's rights.
    monkeypatch.setattr(
        local.os, "access", lambda path, mode: real(path, mode) and os.stat(path).st_mode & 0o444
    )
    one = found("model", engine={"model": str(tmp_path)})[str(tmp_path)]
    assert one.verdict is Verdict.WRONG
    assert "model.safetensors" in one.what


def test_shared_memory_is_tried(monkeypatch, tmp_path):
    subjects = [one.what for one in found("shared memory").values()]
    assert any("a segment can be made" in what for what in subjects)
    monkeypatch.setattr(segments, "DIRECTORY", tmp_path / "nothing")
    one = list(found("shared memory").values())[-1]
    assert one.verdict is Verdict.WRONG
    assert "a segment cannot be made" in one.what


def test_plain_text_for_everybody_is_a_problem():
    one = found("TLS", worker={"listen": "0.0.0.0:7401"})["this machine"]
    assert one.verdict is Verdict.WRONG
    assert "security.tls" in one.todo
    with socket.socket():
        assert found("TLS") == {}


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_router_that_is_open_to_all_is_a_warning(host):
    one = found("keys", router={"host": host}).get("router.host")
    assert (one.verdict if one else None) is (Verdict.WARNING if host == "0.0.0.0" else None)


def test_variables_for_proxies_are_reported(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@127.0.0.1:9")
    (one,) = found("proxy").values()
    assert "HTTPS_PROXY set" in one.what
    assert "secret" not in one.what
    assert one.verdict is Verdict.OK
