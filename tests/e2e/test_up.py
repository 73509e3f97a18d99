"""`baton up`: it says what it does, and leaves no process behind, however it ends."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
import yaml

from tests.e2e.deployment import MODEL_NAME, Deployment, deployment
from tests.support import eventually, listening


def family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def segments(processes: list[psutil.Process]) -> list[Path]:
    """Shared memory that these processes made; a name tells whose it is. Other tests run beside this one."""
    theirs = {str(one.pid) for one in processes}
    return [path for path in Path("/dev/shm").glob("baton-*") if theirs.intersection(path.name.split("-"))]


def listen_everywhere(one: Deployment) -> None:
    """All parts on all addresses. They find each other on this machine, and a person is told so."""
    one.config["scheduler"]["address"] = f"0.0.0.0:{one.scheduler_port}"
    one.config["router"]["host"] = "0.0.0.0"
    one.config["worker"] = {"listen": "0.0.0.0:0"}
    one.config_file.write_text(yaml.safe_dump(one.config))


@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_no_process_is_left_behind(tmp_path: Path, how: signal.Signals) -> None:
    with deployment(tmp_path / how.name, cold=how is signal.SIGINT) as one:
        if how is signal.SIGTERM:
            listen_everywhere(one)
        one.up()
        process = one.processes["up"]
        assert f"at http://127.0.0.1:{one.port}/v1" in process.text
        assert f"status --scheduler 127.0.0.1:{one.scheduler_port}" in process.text
        assert all(worker.identity.address.startswith("127.0.0.1:") for worker in one.describe().workers)
        all_of_it = family(process.popen.pid)
        assert len(all_of_it) >= 6  # itself, scheduler, prefill, decode, router, watcher
        answer = one.client().chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )
        assert answer.choices[0].message.content
        assert segments(all_of_it)
        process.popen.send_signal(how)
        status = process.wait(30)
        assert status == (-9 if how is signal.SIGKILL else 0)
        eventually(lambda: gone(all_of_it), 10, f"all of {all_of_it} have ended")
        eventually(lambda: not listening(one.port), 5, "the port is free again")
    if how is not signal.SIGKILL:
        assert not segments(all_of_it)
        assert "no process is left" in process.text


@pytest.mark.timeout(150)
def test_ctrl_c_while_engines_load(tmp_path: Path) -> None:
    with deployment(tmp_path / "early") as one:
        process = one.start("up", "up", "--log-dir", str(tmp_path / "logs"))
        eventually(lambda: "code loaded" in process.text, 60, "it has begun")
        all_of_it = family(process.popen.pid)
        process.popen.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        eventually(lambda: gone(all_of_it), 10, "all have ended")


@pytest.mark.timeout(150)
def test_the_parts_one_by_one(tmp_path: Path) -> None:
    """As a cluster starts them. kill -9 of the only decode worker: the prefill worker goes on with its
    answer, and nothing is left of it. SIGTERM: the worker drains and leaves the registry."""
    with deployment(tmp_path / "single") as one:
        for name in ("scheduler", "decode", "prefill", "router"):
            one.start(name, name)
        eventually(
            lambda: one.workers("decode") and one.workers("prefill"), 60, "both workers are ready", 0.5
        )
        eventually(one.healthy, 30, "the router is healthy")
        killed, drained = (
            family(one.processes["decode"].popen.pid),
            family(one.processes["prefill"].popen.pid),
        )
        with one.client() as client:
            stream = client.completions.create(
                model=MODEL_NAME, prompt="x", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            one.processes["decode"].kill()
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        past = eventually(
            lambda: [p for p in one.describe().handoffs if p.outcome == "length"], 5, "it is over"
        )
        assert past[0].decode_worker_id.startswith("prefill-")
        assert one.processes["prefill"].end() == 0
        eventually(lambda: gone(killed) and gone(drained), 10, "nothing of either is left")
        eventually(lambda: not one.status().get("workers"), 15, "the registry is empty")


def test_status_shows_who_read_and_who_wrote(one_pair: Deployment) -> None:
    one_pair.client().completions.create(model=MODEL_NAME, prompt="def main(", max_tokens=12)

    def last() -> list[dict[str, object]]:
        return [past for past in one_pair.status().get("handoffs", []) if past["cost"].get("transport")]

    newest = eventually(last, 10, "the request is reported")[0]
    assert str(newest["prefill_worker_id"]).startswith("prefill-0.")
    assert str(newest["decode_worker_id"]).startswith("decode-0.")
