"""No single body disturbs a router's other streams: checks their gaps, its memory and its answers.

    .venv/bin/python -m tests.fuzz.bodies --number 2000 --seed 1

A real router serves a worker without an engine, which makes a token every 10 ms for one stream that is read
all the time. Meanwhile one body after another is sent. A body's gap is the longest between two pieces of the
stream until the body is answered; if it is too long, the smallest of three tries counts, because a busy
machine may stand still by itself. Its memory is the growth of the router's resident set at its peak. Windows
without a body in between show the gaps of the machine itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.router import wait_ready
from harness.deployment import MODEL as WEIGHTS
from harness.support import ROOT, free_port
from tests.fuzz.shapes import MODEL, bodies

STEP_S = 0.01
MAX_MODEL_LEN = 131_072  # a usual length; the demo's own 2,048 would refuse long texts
GAP_S = 0.25  # allowed on top of the longest gap of an idle router
MEMORY_FACTOR, MEMORY_BYTES = 10, 64 << 20
ANSWER_S = 120.0
UNAVAILABLE = (503, 504)
LONGEST_ERROR = 32 << 10  # bytes: 4,000 characters, escaped
TRIES = 3  # tries for a body whose gap was too long, as the machine may have stood still
IDLE_EVERY, IDLE_S = 10, 0.5  # after this many bodies, a window without a body


@dataclass(frozen=True)
class Outcome:
    """The effects of one body."""

    kind: str
    path: str
    size: int
    status: int
    answer: bytes
    gap_s: float
    grown: int  # growth of the router, in bytes
    took_s: float

    @property
    def within_memory(self) -> bool:
        return self.grown <= MEMORY_FACTOR * self.size + MEMORY_BYTES

    @property
    def served(self) -> bool:
        """Return whether its answer is an allowed one."""
        if 0 < self.status < 400:
            return True  # it may repeat the question
        return (self.status in UNAVAILABLE or 0 < self.status < 500) and len(self.answer) < LONGEST_ERROR

    def __str__(self) -> str:
        return (
            f"{self.kind:10} {self.path:28} {self.size:8} B  {self.status}  gap {1e3 * self.gap_s:6.0f} ms  "
            f"grown {self.grown / 2**20:6.1f} MiB  took {self.took_s:5.2f} s  answer {len(self.answer)} B"
        )


@dataclass
class Result:
    """The effects of all bodies, and the gaps of windows without a body."""

    outcomes: list[Outcome] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)

    @property
    def allowed_s(self) -> float:
        return GAP_S + max(self.idle_s, default=0.0)

    @property
    def wrong(self) -> list[Outcome]:
        return [
            one
            for one in self.outcomes
            if one.gap_s > self.allowed_s or not one.within_memory or not one.served
        ]

    def __str__(self) -> str:
        slow, large = (
            sorted(self.outcomes, key=key, reverse=True)[:5]
            for key in (lambda one: one.gap_s, lambda one: one.grown - MEMORY_FACTOR * one.size)
        )
        gaps = [1e3 * one.gap_s for one in sorted(self.outcomes, key=lambda one: one.gap_s)]
        statuses = dict(sorted(Counter(one.status for one in self.outcomes).items()))
        size = sum(one.size for one in self.outcomes) / 2**20
        lines = [
            f"{len(self.outcomes)} bodies, {size:.0f} MiB; statuses {statuses}",
            f"gap: median {gaps[len(gaps) // 2]:.0f} ms, 99 % {gaps[len(gaps) * 99 // 100]:.0f} ms, longest "
            f"{gaps[-1]:.0f} ms; without a body at most {1e3 * max(self.idle_s, default=0):.0f} ms",
            *("the longest gaps:", *map(str, slow), "the most memory beyond ten times the size:"),
            *(*map(str, large), f"{len(self.wrong)} beyond the limits", *map(str, self.wrong[:20])),
        ]
        return "\n".join(lines)


class Stream:
    """A client that reads a stream all the time, and begins another one when it ends."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._longest = 0.0
        self._last = time.monotonic()
        self._ends = False
        self.pieces = 0
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join(ANSWER_S)

    def begin(self) -> None:
        """Begin a window."""
        self._longest = 0.0

    def longest(self) -> float:
        """Return the longest gap of the window, including an unfinished one."""
        return max(self._longest, time.monotonic() - self._last)

    def _read(self) -> None:
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
                    self.pieces += 1


class Bodies:
    """Sends bodies to a router beside its stream."""

    def __init__(self, port: int, pid: int, stream: Stream) -> None:
        self._port = port
        self._pid = pid
        self._stream = stream

    def idle(self) -> float:
        """Return the longest gap of a window without a body."""
        self._stream.begin()
        time.sleep(IDLE_S)
        return self._stream.longest()

    def send(self, kind: str, path: str, body: bytes) -> Outcome:
        """Send a body and read its whole answer. Without an answer the status is 0."""
        before = self._reset_memory()
        self._stream.begin()
        began = time.monotonic()
        status, answer = 0, b""
        try:
            client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
            headers = {"Content-Type": "application/json", "X-Request-Timeout": "20"}
            client.request("POST", path, body, headers)
            response = client.getresponse()
            status, answer = response.status, response.read()
            client.close()
        except (OSError, http.client.HTTPException) as error:
            answer = repr(error).encode()
        took = time.monotonic() - began
        time.sleep(2 * STEP_S)
        gap = self._stream.longest()
        return Outcome(kind, path, len(body), status, answer, gap, self._peak() - before, took)

    def _reset_memory(self) -> int:
        """Reset the kernel's peak of the router's memory; return its current size."""
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        return self._memory("VmRSS")

    def _peak(self) -> int:
        return self._memory("VmHWM")

    def _memory(self, name: str) -> int:
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) << 10


@contextlib.contextmanager
def router(folder: Path) -> Iterator[tuple[int, int]]:
    """Run a router over a worker without an engine; yield the router's port and process id."""
    port, scheduler_port = free_port(), free_port()
    environment = {**os.environ, "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    commands = (["--serve-worker", str(scheduler_port)], ["--serve-router", str(port), str(scheduler_port)])
    with contextlib.ExitStack() as stack:
        for number, command in enumerate(commands):
            log = stack.enter_context((folder / f"{number}.log").open("wb"))
            line = [sys.executable, "-m", "tests.fuzz.bodies", *command]
            process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=log, stderr=log)
            stack.callback(_end, process)
        wait_ready(port)
        yield port, process.pid


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    process.kill()
    process.wait(20)


def try_all(folder: Path, number: int, seed: int, *, aloud: bool = False) -> Result:
    """Send this many bodies, one after another, to a separate router."""
    result = Result()
    with router(folder) as (port, pid), Stream(port) as stream:
        sender = Bodies(port, pid, stream)
        for warm in bodies(13, 0, 1_000):
            sender.send(*warm)
        for one, body in enumerate(bodies(number, seed)):
            if one % IDLE_EVERY == 0:
                result.idle_s.append(sender.idle())
            outcome = sender.send(*body)
            for _ in range(TRIES - 1):
                if outcome.gap_s < GAP_S:
                    break
                outcome = replace(outcome, gap_s=min(outcome.gap_s, sender.send(*body).gap_s))
            result.outcomes.append(outcome)
            if aloud:
                print(outcome, flush=True)
    return result


async def _serve_worker(scheduler_port: int) -> None:
    from baton.protos import scheduler_pb2 as pb
    from baton.scheduler.service import SchedulerServer
    from baton.services.config import SchedulerSettings
    from harness.fake_worker import FakeWorker
    from harness.router import Members

    settings = SchedulerSettings(
        address=f"127.0.0.1:{scheduler_port}", max_queued_prompt_tokens=4 * MAX_MODEL_LEN
    )
    async with SchedulerServer(settings) as server:
        members = Members(server.address)
        worker = FakeWorker("m0", pb.ROLE_MIXED, step_s=STEP_S)
        worker.max_model_len = MAX_MODEL_LEN
        await members.add(worker)
        await asyncio.Event().wait()


def _serve_router(port: int, scheduler_port: int) -> None:
    from baton.services.config import load
    from baton.services.fleet.routers import run_routers

    engine = {
        "model": str(WEIGHTS),
        "served_model_name": MODEL,
        "max_model_len": MAX_MODEL_LEN,
        "tool_call_parser": "hermes",
    }
    settings = {
        "engine": engine,
        "scheduler": {"address": f"127.0.0.1:{scheduler_port}"},
        "router": {"port": port},
        "ops": {"listen": ""},
    }
    run_routers(load(settings))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--aloud", action="store_true", help="print each body's outcome")
    parser.add_argument("--serve-worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve-router", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_worker:
        asyncio.run(_serve_worker(options.serve_worker))
    elif options.serve_router:
        _serve_router(*options.serve_router)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = try_all(Path(folder), options.number, options.seed, aloud=options.aloud)
        print(result)
        sys.exit(bool(result.wrong))


if __name__ == "__main__":
    main()
