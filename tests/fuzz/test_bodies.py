"""No single body disturbs a router's other streams: their gaps, the router's memory and its answers.

A router serves a fake worker, which makes a token every 10 ms for one stream that is read all the time, while
one body after another is sent. A body's gap is the longest between two pieces of the stream until the body's
answer. If it is too long, the smallest of three tries counts, because a busy machine may stall by itself. A
body's memory is the growth of the router's resident set at its peak. Windows without a body show the
machine's own gaps.

FUZZ_BODIES=2000 tries more than the few of each kind: `FUZZ_BODIES=2000 make test
ARGS=tests/fuzz/test_bodies.py`.
"""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.service import SchedulerServer
from baton.services.config import SchedulerSettings
from harness import zygote
from harness.deployment import MODEL as WEIGHTS
from harness.fake_worker import FakeWorker
from harness.router import Members
from harness.support import eventually, free_port
from tests.fuzz.shapes import KINDS, MODEL, bodies

NUMBER = int(os.environ.get("FUZZ_BODIES", 3 * len(KINDS)))
SEED = 3
STEP_S = 0.01
MAX_MODEL_LEN = 131_072  # a usual length; the demo's own 2,048 would refuse long texts
GAP_S = 0.25  # allowed on top of the longest gap without a body
MEMORY_FACTOR, MEMORY_BYTES = 10, 64 << 20  # allowed growth: this many times the body, plus a constant
ANSWER_S = 120.0
UNAVAILABLE = (503, 504)
LONGEST_ERROR = 32 << 10  # bytes: 4,000 characters, escaped
TRIES = 3
IDLE_EVERY, IDLE_S = 10, 0.5  # after this many bodies, a window without a body


@dataclass(frozen=True)
class Outcome:
    kind: str
    path: str
    size: int
    status: int  # 0 without an answer
    answer: int  # bytes
    gap_s: float
    grown: int  # the router's memory, in bytes

    @property
    def within_memory(self):
        return self.grown <= MEMORY_FACTOR * self.size + MEMORY_BYTES

    @property
    def served(self):
        """Whether the status is allowed. A good answer may repeat the question, an error must be short."""
        if 0 < self.status < 400:
            return True
        return (self.status in UNAVAILABLE or 0 < self.status < 500) and self.answer < LONGEST_ERROR


class Stream:
    """A client that reads a stream all the time, and begins another one when it ends."""

    def __init__(self, port):
        self._port = port
        self._longest = 0.0
        self._last = time.monotonic()
        self._ends = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ends = True
        self._thread.join(ANSWER_S)

    def begin(self):
        self._longest = 0.0

    def longest(self):
        """Return the longest gap of the window, including an unfinished one."""
        return max(self._longest, time.monotonic() - self._last)

    def _read(self):
        body = json.dumps(
            {"model": MODEL, "prompt": [72, 105], "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        )
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        while not self._ends:
            with socket.create_connection(("127.0.0.1", self._port), ANSWER_S) as client:
                client.sendall(request)
                self._last = time.monotonic()
                while not self._ends and client.recv(1 << 16):
                    now = time.monotonic()
                    self._longest = max(self._longest, now - self._last)
                    self._last = now


class Sender:
    """Sends bodies to a router during its stream."""

    def __init__(self, port, pid, stream):
        self._port = port
        self._process = Path(f"/proc/{pid}")
        self._stream = stream

    def idle(self):
        """Return the longest gap of a window without a body."""
        self._stream.begin()
        time.sleep(IDLE_S)
        return self._stream.longest()

    def send(self, kind, path, body):
        """Send a body and read its whole answer."""
        (self._process / "clear_refs").write_text("5")  # resets VmHWM
        before = self._memory("VmRSS")
        self._stream.begin()
        status, answer = 0, b""
        with contextlib.suppress(OSError, http.client.HTTPException):
            client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
            headers = {"Content-Type": "application/json", "X-Request-Timeout": "20"}
            client.request("POST", path, body, headers)
            response = client.getresponse()
            status, answer = response.status, response.read()
            client.close()
        time.sleep(2 * STEP_S)
        gap = self._stream.longest()
        return Outcome(kind, path, len(body), status, len(answer), gap, self._memory("VmHWM") - before)

    def send_again_if_slow(self, kind, path, body):
        outcome = self.send(kind, path, body)
        for _ in range(TRIES - 1):
            if outcome.gap_s < GAP_S:
                break
            outcome = replace(outcome, gap_s=min(outcome.gap_s, self.send(kind, path, body).gap_s))
        return outcome

    def _memory(self, name):
        status = (self._process / "status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) << 10


def run_worker(scheduler_port):
    """Run a scheduler with a fake worker, in a forked process, until its end."""

    async def serve():
        settings = SchedulerSettings(
            address=f"127.0.0.1:{scheduler_port}", max_queued_prompt_tokens=4 * MAX_MODEL_LEN
        )
        async with SchedulerServer(settings) as server, Members(server.address) as members:
            worker = FakeWorker("m0", pb.ROLE_MIXED, step_s=STEP_S)
            worker.max_model_len = MAX_MODEL_LEN
            await members.add(worker)
            await asyncio.Event().wait()

    asyncio.run(serve())


@contextlib.contextmanager
def router(folder):
    """Run a router over a fake worker; yield the router's port and process id."""
    port, scheduler_port = free_port(), free_port()
    engine = {"model": str(WEIGHTS), "served_model_name": MODEL, "max_model_len": MAX_MODEL_LEN}
    settings = {
        "engine": {**engine, "tool_call_parser": "hermes"},
        "scheduler": {"address": f"127.0.0.1:{scheduler_port}"},
        "router": {"port": port},
        "ops": {"listen": ""},
    }
    environment = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    start = zygote.shared().start
    processes = [
        start("worker", f"{__name__}:run_worker", folder, scheduler_port=scheduler_port),
        start(
            "router", "harness.forked:run", folder, kind="router", settings=settings, environment=environment
        ),
    ]

    def ready():
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        return False

    try:
        eventually(ready, 60, "the router is ready")
        yield port, processes[1].pid
    finally:
        zygote.end_all(processes, 20)


@pytest.mark.timeout(600 + NUMBER)
def test_no_body_holds_up_other_streams(tmp_path):
    idle_s, outcomes = [], []
    with router(tmp_path) as (port, pid), Stream(port) as stream:
        sender = Sender(port, pid, stream)
        for warm in bodies(len(KINDS), 0, 1_000):
            sender.send(*warm)
        for number, body in enumerate(bodies(NUMBER, SEED)):
            if number % IDLE_EVERY == 0:
                idle_s.append(sender.idle())
            outcomes.append(sender.send_again_if_slow(*body))
    allowed_s = GAP_S + max(idle_s)
    wrong = [one for one in outcomes if one.gap_s > allowed_s or not one.within_memory or not one.served]
    assert not wrong, wrong[:20]
    assert {one.kind for one in outcomes} == {kind.__name__ for kind in KINDS}
    assert any(one.status == 200 for one in outcomes)
    assert any(one.status == 413 for one in outcomes)
