"""Keys and passwords show neither in ps nor in output, wherever users put them."""

import json
import signal
from pathlib import Path

import pytest
import yaml

from harness.checkpoints import tiny_qwen2
from harness.deployment import deployment, status_of
from harness.scheduling import RedisServer
from harness.support import PATIENCE, eventually, family, gone
from tests.e2e.test_bad_start import fails_forked

CANARY = "c4nary"
KEY, PASSWORD, TOKEN = f"{CANARY}-key", f"{CANARY}-password", f"{CANARY}-hf-token"
PARTS = {"watcher", "scheduler", "mixed-0", "router"}


def titles(pid):
    """Return the command lines of a process and its descendants, as `ps` shows them."""
    found = []
    for one in family(pid):
        raw = Path(f"/proc/{one.pid}/cmdline").read_bytes()
        found.append(raw.replace(b"\0", b" ").decode(errors="replace").strip())
    return found


@pytest.mark.timeout(240)
def test_nothing_shows_them(tmp_path):
    """Pass them on the command line of `baton up`, the worst place, and make the store fail."""
    model = tiny_qwen2(tmp_path / "model")
    redis = RedisServer(tmp_path, password=PASSWORD)
    with deployment(tmp_path / "up") as one:
        one.config["engine"] = {"model": str(model), "kv_cache_gib": 0.1, "max_model_len": 256}
        one.config_file.write_text(yaml.safe_dump(one.config))
        logs = one.folder / "logs"
        with redis:
            extra = json.dumps({"hf_token": TOKEN})
            one.up(0, 0, 1, "--api-key", KEY, "--store", redis.url, "--engine-args", extra)
            process = one.processes["up"]
            pid = process.popen.pid
            seen = titles(pid)
            assert {f"baton {name}" for name in PARTS} <= set(seen)
            assert seen[0].startswith("baton up --api-key *** --store *** --engine-args *** --prefill 0 ")
            assert seen[0].endswith(f" --mixed 1 --log-dir {logs} --config {one.config_file}")
            assert status_of(f"{one.url}/v1/models") == 401
            status = one.baton("status")
            assert status.returncode == 0
            assert f"redis://127.0.0.1:{redis.port}/0" in status.stdout
        scheduler_log = logs / "scheduler.log"
        eventually(lambda: "the store is down" in scheduler_log.read_text(), 20, "the scheduler notices")
        redis.password = "another"
        with redis:
            eventually(lambda: "refused the password" in one.describe().store_problem, 20, "it is refused")
            seen += titles(pid)
        all_of_it = family(pid)
        process.popen.send_signal(signal.SIGINT)
        assert process.wait(60 * PATIENCE) == 0
        eventually(lambda: gone(all_of_it), 10, f"all of {all_of_it} have ended")
        said = [process.text, status.stdout, status.stderr, *(log.read_text() for log in logs.iterdir())]
    assert len(said) == len(PARTS) + 3
    for text in (*seen, *said):
        assert CANARY not in text


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["router", "--api-key", KEY, "--engine-args", f'{{"hf_token": "{TOKEN}"'], "is not valid JSON"),
        (["router", "--api-key", KEY, "--keys-file", "/nowhere"], "leave it out"),
        (["scheduler", "--store", f"redis://:{PASSWORD}/x@127.0.0.1/0"], "is not a Redis URL"),
        (
            ["scheduler", "--store", f"redis:/{PASSWORD}"],
            "use memory, redis://, redis+sentinel:// or redis+cluster://",
        ),
        (["scheduler", "--store", "redis://h?password_file=/nowhere"], "cannot read '/nowhere'"),
        (["up", "--model", "{model}", "--api-key", "file:/nowhere"], "cannot read '/nowhere'"),
        (["up", "--model", "{model}", "--engine-args", f'{{"model": "{TOKEN}"}}'], "is not for you to set"),
    ],
)
def test_a_refusal_shows_none(tmp_path, command, said):
    model = tiny_qwen2(tmp_path / "model") if "{model}" in command else Path()
    line = fails_forked(tmp_path, *(part.replace("{model}", str(model)) for part in command))
    assert said in line
    assert CANARY not in line


@pytest.mark.parametrize("extra", [{"hf_token": [TOKEN]}, {"hf_tokens": TOKEN}, {"runner": TOKEN}])
def test_nor_does_vllms(tmp_path, extra):
    """Pydantic's messages, which vLLM uses, quote their input."""
    from baton.services.config import load
    from baton.services.errors import ServiceError
    from baton.services.router.vllm.frontend import build_config

    settings = load({"engine": {"model": str(tiny_qwen2(tmp_path / "model")), "extra": extra}})
    with pytest.raises(ServiceError) as error:
        build_config(settings)
    assert CANARY not in str(error.value)
    assert next(iter(extra)) in str(error.value)
