"""Measure the router's cost per token: 64 streams through vLLM's front end, from a worker without an engine.

    python -m bench router                         tokens/s and CPU microseconds per token, by engine step
    python -m bench router --processes 1 2 --flush-ms 0 20
                                                   every combination, alternating

Worker, scheduler and clients run in other processes; the figure is the CPU time of the router's processes.
`--interval-ms` is the engine's step: 0 sends as fast as the router receives, which saturates it; 20 is a
typical decode step and shows the cost without a backlog.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.options import options
from harness.checkpoints import tiny_qwen2
from harness.deployment import status_of
from harness.stats import median, save
from harness.support import COMMAND, ROOT, eventually, free_port, listening, running

MODEL = "tiny"
PROMPT = [72, 105]
READY_S = 90.0


async def serve_worker(scheduler_port: int, step_s: float) -> None:
    """Run a scheduler and one mixed worker until killed."""
    from baton.protos import scheduler_pb2 as pb
    from baton.scheduler.service import SchedulerServer
    from baton.services.config import SchedulerSettings
    from harness.fake_worker import FakeWorker
    from harness.router import Members

    settings = SchedulerSettings(address=f"127.0.0.1:{scheduler_port}")
    async with SchedulerServer(settings) as server, Members(server.address) as members:
        await members.add(FakeWorker("m0", pb.ROLE_MIXED, step_s=step_s))
        await asyncio.Event().wait()


def worker(scheduler_port: int, step_ms: float) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run a scheduler and a worker without an engine in another process during the block."""
    line = [sys.executable, "-m", "bench.router", "--serve-worker", scheduler_port, "--interval-ms", step_ms]
    return running(line, lambda: listening(scheduler_port), READY_S, cwd=ROOT)


def router(
    folder: Path, port: int, scheduler_port: int, model: Path, **settings: Any
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run `baton router` with these settings of its section during the block."""
    config = {
        "engine": {"model": str(model), "served_model_name": MODEL, "max_model_len": 2048},
        "scheduler": {"address": f"127.0.0.1:{scheduler_port}"},
        "ops": {"listen": ""},
        "router": {"port": port, **settings},
    }
    (file := folder / f"router-{port}.yaml").write_text(yaml.safe_dump(config))
    health = f"http://127.0.0.1:{port}/health"
    line = [*COMMAND, "router", "--config", file]
    return running(line, lambda: status_of(health) == 200, READY_S, folder / f"router-{port}.log")


async def one_stream(port: int, max_tokens: int) -> tuple[int, int]:
    """Return the bytes and events of one answer, read from a plain socket to keep the client cheap."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "stream": True,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
    )
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
    )
    size = events = 0
    tail = b""
    while data := await reader.read(1 << 16):
        size += len(data)
        events += data.count(b"\ndata: ")
        tail = (tail + data)[-600:]
    writer.close()
    if f'"completion_tokens":{max_tokens}'.encode() not in tail:
        raise RuntimeError(f"a stream does not have {max_tokens} tokens; it ended with {tail!r}")
    return size, events


async def drive(port: int, streams: int, max_tokens: int) -> tuple[int, int]:
    done = await asyncio.gather(*(one_stream(port, max_tokens) for _ in range(streams)))
    return sum(size for size, _ in done), sum(events for _, events in done)


def measure(
    given: argparse.Namespace, interval_ms: float, processes: int = 1, flush_ms: float = 0.0
) -> dict[str, Any]:
    port, scheduler_port = free_port(), free_port()
    settings = {"processes": processes, "flush_ms": flush_ms}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = tiny_qwen2(folder / "model")
        stack.enter_context(worker(scheduler_port, interval_ms))
        process = stack.enter_context(router(folder, port, scheduler_port, model, **settings))
        wait_all(process.pid, processes)
        asyncio.run(drive(port, given.streams, 32))
        parent = psutil.Process(process.pid)
        routers = [parent, *parent.children()]
        before, began = cpu_s(routers), time.monotonic()
        size, events = asyncio.run(drive(port, given.streams, given.tokens))
        took = time.monotonic() - began
        after = cpu_s(routers)
        rss = sum(one.memory_info().rss for one in routers)
        pss = sum(one.memory_full_info().pss for one in routers)
    tokens = given.streams * given.tokens
    user, system = after[0] - before[0], after[1] - before[1]
    return {
        "processes": processes,
        "flush_ms": flush_ms,
        "streams": given.streams,
        "tokens": tokens,
        "interval_ms": interval_ms,
        "seconds": round(took, 2),
        "tokens_per_s": round(tokens / took),
        "router_cpu_us_per_token": round(1e6 * (user + system) / tokens, 1),
        "of_it_system_us": round(1e6 * system / tokens, 1),
        "tokens_per_s_a_core": round(tokens / (user + system)),
        "tokens_per_event": round(tokens / events, 2),
        "bytes_per_token": round(size / tokens),
        "router_rss_mib": round(rss / 2**20),
        "router_pss_mib": round(pss / 2**20),
    }


def wait_all(pid: int, processes: int) -> None:
    """Wait until every process of a router serves; /health answers as soon as the first does."""

    def serves(process: psutil.Process) -> bool:  # it connects to the scheduler when it starts to serve
        return any(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections("tcp"))

    def all_serve() -> bool:
        return processes == 1 or sum(map(serves, psutil.Process(pid).children())) >= processes

    eventually(all_serve, READY_S, f"{processes} processes serve")


def cpu_s(routers: list[psutil.Process]) -> tuple[float, float]:
    times = [one.cpu_times() for one in routers]
    return sum(one.user for one in times), sum(one.system for one in times)


def compare_processes(given: argparse.Namespace) -> None:
    """Measure every number of processes with every flush interval, alternating."""
    interval_ms = given.interval_ms[0]
    arms = [(count, flush_ms) for count in given.processes for flush_ms in given.flush_ms]
    runs: dict[tuple[int, float], list[dict[str, Any]]] = {arm: [] for arm in arms}
    for number in range(given.rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            runs[arm].append(measure(given, interval_ms, *arm))
            print(json.dumps(runs[arm][-1]), flush=True)
    keys = (
        *("router_cpu_us_per_token", "tokens_per_s", "tokens_per_s_a_core", "tokens_per_event"),
        *("router_rss_mib", "router_pss_mib"),
    )
    medians = [
        {"processes": count, "flush_ms": flush_ms, **{key: median([one[key] for one in of]) for key in keys}}
        for (count, flush_ms), of in runs.items()
    ]
    save("router-processes", {"interval_ms": interval_ms, "rounds": given.rounds, "arms": medians})


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        streams=64,
        tokens=(500, "of each answer"),
        interval_ms=([4.0, 2.0, 0.0], "the engine's step; 0: no pause"),
        processes=([int], "numbers of router processes to compare"),
        flush_ms=([0.0], "router.flush_ms, with --processes"),
        rounds=(3, "with --processes"),
        serve_worker=(int, argparse.SUPPRESS),
    )
    if given.serve_worker:
        asyncio.run(serve_worker(given.serve_worker, given.interval_ms[0] / 1e3))
    elif given.processes:
        compare_processes(given)
    else:
        runs = []
        for interval_ms in given.interval_ms:
            runs.append(measure(given, interval_ms))
            print(json.dumps(runs[-1]), flush=True)
        save("router", {"runs": runs})


if __name__ == "__main__":  # the worker's process
    main(sys.argv[1:])
