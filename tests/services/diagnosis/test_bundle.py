import asyncio
import json
import stat
import tarfile

import pytest
import yaml
from aiohttp import web

from baton.services.config import load
from baton.services.diagnosis import bundle
from baton.services.diagnosis.bundle import HIDDEN, Hider, masked
from harness.serving import serving
from harness.support import free_port

MARK = "c4nary"
SECRETS = {
    "api": f"{MARK}-api-key",
    "store": f"{MARK}/store word",  # the space is escaped in a URL
    "keys": f"{MARK}-keys-store",
    "hub": f"{MARK}-hub",
    "nested": f"{MARK}-nested-value",
    "token": f"{'a' * 12}.{MARK.encode().hex():0<32}.{'b' * 64}",
    "file": f"{MARK}-from-a-file",
    "page": f"{MARK}-page-key",
    "header": f"{MARK}-tracing-key",
    "bearer": f"{MARK}-tracing-bearer",
    "environment": f"{MARK}-in-the-environment",
}


async def metrics(request):
    return web.Response(text="seen " + request.headers.get("Authorization", ""))


def config(folder, router_port):
    def written(name):
        path = folder / name
        path.write_text(SECRETS[name] + "\n")
        path.chmod(0o600)
        return str(path)

    return {
        "engine": {
            "extra": {"hf_token": SECRETS["hub"], "max_logprobs": 5, "deep": {"er": SECRETS["nested"]}}
        },
        "router": {"api_key": SECRETS["api"], "port": router_port},
        "ops": {"key": f"file:{written('page')}"},
        "scheduler": {
            "address": f"127.0.0.1:{free_port()}",
            "store": f"redis://127.0.0.1:{free_port()}/0?password_file={written('file')}",
        },
    }


def texts(path):
    with tarfile.open(path) as archive:
        found = {one.name.partition("/")[2]: archive.extractfile(one) for one in archive.getmembers()}
        return {name: file.read().decode() for name, file in found.items() if file}


async def test_no_secret_is_in_it(tmp_path, monkeypatch):
    """Secrets are masked even if a log, a variable or an answer repeats them."""
    monkeypatch.setenv("VLLM_API_KEY", SECRETS["environment"])
    monkeypatch.setenv("BATON_ROUTER__API_KEY", SECRETS["api"])
    headers = f"x-api-key={SECRETS['header']},Authorization=Bearer%20{SECRETS['bearer']}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    logs = tmp_path / "logs"
    logs.mkdir()
    everything = "\n".join(f"{name} is {secret} {json.dumps(secret)}" for name, secret in SECRETS.items())
    (logs / "router.log").write_text(f"beginning\n{'x' * bundle.LOG_END}\n{everything}\nthe end\n")
    out = tmp_path / "bundle.tar.gz"
    out.touch(0o644)  # an older file, readable by all
    async with serving(metrics) as address:
        settings = load(config(tmp_path, address.partition(":")[2]))
        names = await asyncio.to_thread(bundle.write, settings, out, str(logs))
    found = texts(out)
    assert list(found) == names
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    shown = {"store", "keys", "token"}  # handled below
    for name in SECRETS.keys() - shown:
        for part, text in found.items():
            assert SECRETS[name] not in text, (name, part)
    assert "max_logprobs" in found["configuration.yaml"]
    assert found["metrics/router.txt"] == f"seen Bearer {HIDDEN}"
    assert f"BATON_ROUTER__API_KEY={HIDDEN}" in found["variables.txt"]
    log = found["logs/router.log"]
    assert log.endswith("the end\n")
    assert "beginning" not in log
    assert f'api is {HIDDEN} "{HIDDEN}"' in log
    assert json.loads(found["doctor.json"])
    assert "does not answer" in json.loads(found["status.json"])
    assert json.loads(found["versions.json"])["vllm"] == "0.32.0"
    assert "vLLM Version" in found["environment.txt"]
    # Secrets that cannot be in the same configuration as others.
    monkeypatch.delenv("BATON_ROUTER__API_KEY")
    hidden = load(
        {
            "scheduler": {"store": "redis://:c4nary%2Fstore%20word@127.0.0.1:1/0"},
            "security": {"tls": True, "join": "127.0.0.1:1", "token": SECRETS["token"]},
            "router": {"keys_store": f"redis://u:{SECRETS['keys']}@127.0.0.1:1/0"},
        }
    )
    # All other secrets, in both ways.
    dump = yaml.safe_dump(masked(hidden))
    shown = Hider.of(hidden).hide(everything + " c4nary%2Fstore%20word")
    for name in ("store", "keys", "token"):
        assert SECRETS[name] not in dump
        assert SECRETS[name] not in shown
    assert "%2Fstore" not in dump + shown
    assert SECRETS["token"].split(".")[1] not in shown
    path = settings.scheduler.store.partition("password_file=")[2]
    by_file = load({"router": {"keys_store": f"redis://127.0.0.1:1/0?password_file={path}"}})
    assert SECRETS["file"] not in Hider.of(by_file, {}).hide(everything)


def test_it_is_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "bundle.tar.gz").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="link"):
        bundle.write(load(), tmp_path / "bundle.tar.gz", "")
    assert (tmp_path / "mine").read_text() == "kept"


def test_without_secrets_nothing_is_hidden():
    assert Hider.of(load(), {}).hide("memory api_key token ''") == "memory api_key token ''"
    assert masked(load())["scheduler"]["store"] == "memory"
