"""`baton up` reports what it does and leaves no process behind, however it ends."""

import contextlib
import json
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml

from harness.deployment import MODEL_NAME, deployment
from harness.support import PATIENCE, QUICK, eventually, family, gone, listening, segments


def listen_everywhere(one):
    one.config["scheduler"]["address"] = f"0.0.0.0:{one.scheduler_port}"
    one.config["router"]["host"] = "0.0.0.0"
    one.config["worker"] = {"listen": "0.0.0.0:0"}
    one.config["security"] = {"insecure": True}
    one.config_file.write_text(yaml.safe_dump(one.config))


@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_no_process_is_left_behind(tmp_path, how):
    with deployment(tmp_path / how.name, environment={"HOME": str(tmp_path)}) as one:
        if how is signal.SIGTERM:
            listen_everywhere(one)
        secure = ["--secure"] if how is signal.SIGINT else []
        if secure:  # --secure enables TLS and creates the CA in its default folder
            one.config["security"] = {"tls": True, "ca": str(tmp_path / ".baton" / "ca")}
        one.up(1, 1, 0, *secure)
        assert (tmp_path / ".baton" / "ca").exists() == bool(secure)
        process = one.processes["up"]
        assert f"at http://127.0.0.1:{one.port}/v1" in process.text
        operator = " --secure --security-ca ~/.baton/ca" if secure else "\n"
        assert f"status --scheduler 127.0.0.1:{one.scheduler_port}{operator}" in process.text
        assert all(worker.identity.address.startswith("127.0.0.1:") for worker in one.describe().workers)
        all_of_it = family(process.popen.pid)
        assert len(all_of_it) >= 6  # itself, scheduler, prefill, decode, router, watcher
        answer = one.client().chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )
        assert answer.choices[0].message.content
        assert segments(all_of_it)
        process.popen.send_signal(how)
        status = process.wait(30 * PATIENCE)
        assert status == (-9 if how is signal.SIGKILL else 0)
        eventually(lambda: gone(all_of_it), 10, f"all of {all_of_it} have ended")
        eventually(lambda: not listening(one.port), 5, "the port is free again")
    if how is not signal.SIGKILL:
        assert not segments(all_of_it)
        assert "no process is left" in process.text


@pytest.mark.timeout(150)
def test_ctrl_c_while_engines_load(tmp_path):
    with deployment(tmp_path / "early") as one:
        process = one.start("up", "up", "--log-dir", str(tmp_path / "logs"))
        eventually(lambda: "vLLM imported" in process.text, 60, "it has begun")
        all_of_it = family(process.popen.pid)
        process.popen.send_signal(signal.SIGINT)
        assert process.wait(30 * PATIENCE) == 0
        eventually(lambda: gone(all_of_it), 10, "all have ended")


def loads(process, library):
    """Return whether it or a child has mapped this library, so that it is in the middle of its imports."""
    try:
        maps = [Path(f"/proc/{one.pid}/maps").read_text() for one in family(process.popen.pid)]
    except (OSError, psutil.Error):
        return False
    return any(library in one for one in maps)


def told_to_end(one, how, *command):
    """Signal a command while it imports vLLM. Return its process and how long it took to end."""
    process = one.start(command[0], *command)
    eventually(lambda: loads(process, "libtorch"), 60, "it imports torch")
    all_of_it = family(process.popen.pid)
    began = time.monotonic()
    process.popen.send_signal(how)
    process.wait(30 * PATIENCE)
    took = time.monotonic() - began
    eventually(lambda: gone(all_of_it), 10, "all have ended")
    return process, took


@pytest.fixture
def cold(tmp_path):
    """Return a deployment that starts cold: forked processes have imported vLLM."""
    with deployment(tmp_path / "import", cold=True) as one:
        yield one


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("command", "how"), [("up", signal.SIGINT), ("router", signal.SIGTERM)])
def test_a_signal_while_vllm_is_imported(cold, command, how):
    """`baton up` ends at once and leaves no process."""
    process, took = told_to_end(cold, how, command)
    assert process.popen.returncode == 0, process.text
    assert "vLLM imported" not in process.text
    assert "nanobind" not in process.text
    assert "Traceback" not in process.text
    assert took < 5 * PATIENCE  # 0.5 s on a quiet machine


@pytest.mark.timeout(150)
def test_a_batch_told_to_end_while_it_starts(cold, tmp_path):
    requests = tmp_path / "in.jsonl"
    body = {"model": MODEL_NAME, "prompt": "x"}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    requests.write_text(json.dumps(line))
    command = ("batch", str(requests), str(tmp_path / "out.jsonl"))
    process, took = told_to_end(cold, signal.SIGTERM, *command)
    assert process.popen.returncode == 130, process.text
    assert took < 5 * PATIENCE
    assert "interrupted: 0 of 1 are done" in process.text


@pytest.mark.timeout(150)
def test_a_worker_told_to_end_while_it_imports(cold):
    cold.start("scheduler", "scheduler")
    process, _ = told_to_end(cold, signal.SIGINT, "prefill")
    assert process.popen.returncode == 0, process.text
    assert "ended by a signal while importing vLLM" in process.text
    assert not cold.describe().workers


def part(one, name, *, other_than=0):
    """Wait for the process of a part of `baton up`, and return it."""
    parent = psutil.Process(one.processes["up"].popen.pid)

    def found():
        for child in parent.children():
            with contextlib.suppress(psutil.Error):
                if " ".join(child.cmdline()).strip() == f"baton {name}" and child.pid != other_than:
                    return child
        return None

    return eventually(found, 30, f"{name} runs")


@pytest.mark.timeout(150)
def test_what_cannot_come_back_is_done_without(tmp_path):
    """Parts, including the watcher, are restarted. One that dies too often is given up; the others serve.

    `baton up` ends with an error when no worker is left.
    """
    with deployment(tmp_path / "again", constants=QUICK) as one:
        one.up()
        process = one.processes["up"]

        def said(name, text):
            lines = [line for line in process.text.splitlines() if f"] {name} " in line]
            return sum(text in line for line in lines)

        part(one, "watcher").kill()
        eventually(lambda: said("watcher", "restarting"), 20, "the watcher is restarted")
        killed = part(one, "decode-0")
        killed.kill()
        eventually(lambda: said("decode-0", "ready: ") == 2, 60, "the new watcher reports the worker")
        for name, deaths in (("decode-0", 3), ("prefill-0", 4)):
            killed_pid = 0
            for _ in range(deaths):
                killed = part(one, name, other_than=killed_pid)
                killed_pid = killed.pid
                killed.kill()
            if name == "decode-0":
                eventually(
                    lambda: said("decode-0", "given up, the others keep serving"), 20, "it is given up"
                )
                answer = one.client().completions.create(model=MODEL_NAME, prompt="def main(", max_tokens=8)
                assert answer.choices[0].text
        assert process.wait(60 * PATIENCE) == 1
        last = process.text.splitlines()[-1]
        assert last.startswith("baton: error: prefill-0 died 4 times within 10 min, and no worker is left")
