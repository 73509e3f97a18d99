"""`baton up` survives output that is not read, a removed log folder and a dead proxy.

It ends properly when its terminal closes.
"""

import fcntl
import os
import shutil
import signal
import threading

import pytest

from harness import zygote
from harness.deployment import MODEL_NAME, START_S, Process, deployment
from harness.support import BATON, CALL_S, PATIENCE, QUICK, eventually, free_port, ran

F_SETPIPE_SZ = 1031
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


def run(arguments, fifo, proxy):
    """Run `baton ARGUMENT ...` with its output in a small pipe. Called in the forked process."""
    writing = os.open(fifo, os.O_WRONLY)
    fcntl.fcntl(writing, F_SETPIPE_SZ, 4096)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    zygote.run_baton(arguments, "", dict.fromkeys(PROXIES, proxy))


def another_worker(one, *than):
    """Wait for a ready worker other than these and return its id."""

    def found():
        ids = [worker["identity"]["worker_id"] for worker in one.workers("mixed")]
        return next((name for name in ids if name not in than), "")

    return eventually(found, START_S, "another worker is ready")


def fill(fifo):
    """Fill the pipe, so that further output blocks."""
    writing = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(writing, b"\n")
    except BlockingIOError:
        os.close(writing)


def stream(one, found, begun):
    answer = one.client().completions.create(
        model=MODEL_NAME, prompt="def main(", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    for piece in answer:
        found.append(piece)
        begun.set()


@pytest.mark.timeout(200)
def test_it_serves_whatever_becomes_of_its_output(tmp_path):
    fifo, logs = tmp_path / "out", tmp_path / "logs"
    os.mkfifo(fifo)
    proxy = f"http://127.0.0.1:{free_port()}"
    with deployment(tmp_path, constants=QUICK, router={"drain_timeout_s": 60}) as one:
        line = ["up", "--mixed", "1", "--config", str(one.config_file), "--log-dir", str(logs)]
        forked = zygote.shared().start(
            "up", f"{__name__}:run", tmp_path, arguments=line, fifo=str(fifo), proxy=proxy
        )
        one.processes["up"] = Process("up", forked, forked.log)
        reading = os.open(fifo, os.O_RDONLY)
        said = b""
        while b"Ready." not in said:
            chunk = os.read(reading, 4096)
            assert chunk, said.decode()
            said += chunk

        fill(fifo)  # the reader does not read
        first = another_worker(one)
        # A lone mixed worker hands nothing over.
        assert "compatibility_hash" not in one.worker("mixed")["identity"]["capacity"]
        one.worker_process(first).kill()
        second = another_worker(one, first)

        os.close(reading)  # the reader is gone
        shutil.rmtree(logs)
        one.worker_process(second).kill()
        third = another_worker(one, first, second)
        eventually(lambda: "ready on" in (logs / "mixed-0.log").read_text(), 10, "it writes its log")

        named = {**os.environ, **dict.fromkeys(PROXIES, proxy)}
        shown = ran(BATON, "status", "--scheduler", one.scheduler_address, env=named, check=True)
        assert third.split(".")[0] in shown.stdout
        assert one.healthy()

        pieces = []
        begun = threading.Event()
        streaming = threading.Thread(target=stream, args=(one, pieces, begun))
        streaming.start()
        assert begun.wait(CALL_S)
        for number in (signal.SIGHUP, signal.SIGHUP):  # a terminal's and a shell's
            forked.send_signal(number)
        streaming.join(CALL_S)
        assert pieces[-1].choices[0].finish_reason == "length"
        assert one.processes["up"].wait(30 * PATIENCE) == 0
