"""The cost of a token in the router: 64 streams through vLLM's front end, from a worker without an engine.

    python -m bench.router                         one run: tokens/s, CPU microseconds a token
    python -m bench.router --profile out.pstats    and where the time goes
    python -m bench.router --sample 0.01 1         without traces and with these shares of them, in turns
    python -m bench.router --processes 1 2 --flush-ms 0 20
                                                   each number of processes with each flush, in turns

The worker, the scheduler and the clients run in processes of their own; the figure that counts is the CPU
time of the router's own processes. `--interval-ms` is the engine's step: 0 sends as fast as the router
receives, so that it is saturated; 20 is a usual decode step, and shows the cost while nothing piles up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from harness.stats import median, save

ROOT = Path(__file__).resolve().parent.parent
MODEL = "tiny"
PROMPT = [72, 105]
READY_S = 90.0


async def serve_worker(scheduler_port: int, step_s: float) -> None:
    """Run the scheduler and one mixed worker until killed."""
    from baton.protos import scheduler_pb2 as pb
    from baton.scheduler.service import SchedulerServer
    from baton.services.config import SchedulerSettings
    from harness.fake_worker import FakeWorker
    from harness.router import Members

    async with SchedulerServer(SchedulerSettings(address=f"127.0.0.1:{scheduler_port}")) as server:
        members = Members(server.address)
        await members.add(FakeWorker("m0", pb.ROLE_MIXED, step_s=step_s))
        await asyncio.Event().wait()


def serve_router(
    model: str, port: int, scheduler_port: int, profile: str, extra: dict[str, Any], sections: dict[str, Any]
) -> None:
    """Run the router, profiled if `profile` names a file."""
    from baton.services.config import load
    from baton.services.fleet.routers import run_routers

    settings = load(
        {
            "engine": {"model": model, "served_model_name": MODEL, "max_model_len": 2048, "extra": extra},
            "scheduler": {"address": f"127.0.0.1:{scheduler_port}"},
            **sections,
            "router": {"port": port, **sections.get("router", {})},
        }
    )
    if not profile:
        run_routers(settings)
        return
    import cProfile

    from baton.services.router.app import preload

    preload()  # seconds of imports would hide the rest
    profiler = cProfile.Profile()
    try:
        profiler.runcall(run_routers, settings)
    finally:
        profiler.dump_stats(profile)


async def one_stream(port: int, max_tokens: int) -> tuple[int, int]:
    """Return the bytes and events of one answer, read from a bare socket: the client must cost little."""
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
        raise RuntimeError(f"a stream did not bring {max_tokens} tokens; it ended with {tail!r}")
    return size, events


async def drive(port: int, streams: int, max_tokens: int) -> tuple[int, int]:
    done = await asyncio.gather(*(one_stream(port, max_tokens) for _ in range(streams)))
    return sum(size for size, _ in done), sum(events for _, events in done)


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "bench.router", *arguments], cwd=ROOT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


def wait_ready(port: int) -> None:
    import urllib.error
    import urllib.request

    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError(f"the router is not ready after {READY_S:.0f} s")


def measure(
    options: argparse.Namespace,
    interval_ms: float,
    sample: float | None = None,
    page: str = "",
    beside: AbstractContextManager[None] | None = None,
    processes: int = 1,
    flush_ms: float = 0.0,
) -> dict[str, Any]:
    """Return the figures of one run, with this share of the requests traced; None: without tracing.

    `page` is the address of the router's live page, empty for none; `beside` is entered while tokens flow.
    """
    from harness.checkpoints import tiny_qwen2
    from harness.collector import collecting
    from harness.support import free_port

    port, scheduler_port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder, collecting() as collector:
        model = tiny_qwen2(Path(folder) / "model")
        worker = ("--serve-worker", str(scheduler_port), "--interval-ms", str(interval_ms))
        router = ("--serve-router", str(port), str(scheduler_port), str(model))
        profile = ("--profile", options.profile) if options.profile else ()
        tracing = {} if sample is None else {**collector.settings, "sample_ratio": sample}
        router_section = {"processes": processes, "flush_ms": flush_ms}
        sections = {"tracing": tracing, "ops": {"listen": page}, "router": router_section}
        more = ("--extra", options.extra, "--sections", json.dumps(sections))
        with child(*worker), child(*router, *profile, *more) as process, contextlib.ExitStack() as stack:
            wait_ready(port)
            wait_all(process.pid, processes)
            asyncio.run(drive(port, options.streams, 32))
            stack.enter_context(beside or contextlib.nullcontext())
            parent = psutil.Process(process.pid)
            routers = [parent, *parent.children()]
            before, began = cpu_s(routers), time.monotonic()
            size, events = asyncio.run(drive(port, options.streams, options.tokens))
            took = time.monotonic() - began
            after = cpu_s(routers)
            rss = sum(one.memory_info().rss for one in routers)
            pss = sum(one.memory_full_info().pss for one in routers)
    tokens = options.streams * options.tokens
    user, system = after[0] - before[0], after[1] - before[1]
    return {
        "processes": processes,
        "flush_ms": flush_ms,
        "streams": options.streams,
        "tokens": tokens,
        "interval_ms": interval_ms,
        "sample": sample,
        "traced": sum(span.name == "request" for span in collector.spans),
        "seconds": round(took, 2),
        "tokens_per_s": round(tokens / took),
        "router_cpu_us_per_token": round(1e6 * (user + system) / tokens, 1),
        "of_it_system_us": round(1e6 * system / tokens, 1),
        "tokens_per_s_a_core": round(tokens / (user + system)),
        "tokens_per_event": round(tokens / events, 2),
        "bytes_per_token": round(size / tokens),
        "router_rss_mib": round(rss / 2**20),
        "router_pss_mib": round(pss / 2**20),  # what the processes share is counted once
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }


def wait_all(pid: int, processes: int) -> None:
    """Wait until each process of a router serves: the first that does answers for it."""
    deadline = time.monotonic() + READY_S
    listens = 0
    while processes > 1 and listens < processes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{listens} of {processes} processes serve after {READY_S:.0f} s")
        time.sleep(0.1)
        children = psutil.Process(pid).children()
        # It connects to the scheduler as it begins to serve.
        serves = [any(one.status == psutil.CONN_ESTABLISHED for one in _tcp(child)) for child in children]
        listens = sum(serves)


def _tcp(process: psutil.Process) -> list[Any]:
    return list(process.net_connections("tcp"))


def cpu_s(routers: list[psutil.Process]) -> tuple[float, float]:
    """Return the CPU time of these processes, in seconds: the user's and the system's."""
    times = [one.cpu_times() for one in routers]
    return sum(one.user for one in times), sum(one.system for one in times)


def compare_processes(options: argparse.Namespace) -> None:
    """Measure each number of processes with each flush, in turns."""
    arms = [(count, flush_ms) for count in options.processes for flush_ms in options.flush_ms]
    runs: dict[tuple[int, float], list[dict[str, Any]]] = {arm: [] for arm in arms}
    for number in range(options.rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            count, flush_ms = arm
            runs[arm].append(measure(options, options.interval_ms[0], processes=count, flush_ms=flush_ms))
            print(json.dumps(runs[arm][-1]), flush=True)
    keys = (
        *("router_cpu_us_per_token", "tokens_per_s", "tokens_per_s_a_core", "tokens_per_event"),
        *("router_rss_mib", "router_pss_mib"),
    )
    medians = [
        {"processes": count, "flush_ms": flush_ms, **{key: median([one[key] for one in of]) for key in keys}}
        for (count, flush_ms), of in runs.items()
    ]
    for one in medians:
        print(json.dumps(one), flush=True)
    kept = {"interval_ms": options.interval_ms[0], "rounds": options.rounds}
    save("router-processes", {**kept, "arms": medians})


def compare_traced(options: argparse.Namespace) -> None:
    """Measure without traces and with each share of them, in turns."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        arms: list[float | None] = [None, *options.sample]
        for sample in arms if number % 2 == 0 else arms[::-1]:
            run = measure(options, options.interval_ms[0], sample)
            print(json.dumps(run), flush=True)
            runs.setdefault("off" if sample is None else f"{100 * sample:g} %", []).append(run)
    keys = ("router_cpu_us_per_token", "tokens_per_s", "router_rss_mib", "traced")
    medians = {name: {key: median([one[key] for one in of]) for key in keys} for name, of in runs.items()}
    for name, of in runs.items():  # as far apart as turns of one kind are, differences mean nothing
        cpu = [one["router_cpu_us_per_token"] for one in of]
        medians[name]["router_cpu_us_from_to"] = [min(cpu), max(cpu)]
    save("tracing", {"tokens": options.tokens, "interval_ms": options.interval_ms[0], "shares": medians})


def main(arguments: list[str]) -> None:
    run(options_of(arguments))


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Return what a command line asks for; without arguments the defaults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="of each answer")
    parser.add_argument(
        "--interval-ms", type=float, nargs="+", default=[4.0, 2.0, 0.0], help="the engine's step; 0: no pause"
    )
    parser.add_argument("--profile", default="", help="write the router's cProfile here")
    parser.add_argument("--extra", default="{}", help="engine.extra of the router, JSON")
    parser.add_argument(
        "--sample", type=float, nargs="*", default=[], help="shares of the requests to be traced"
    )
    parser.add_argument("--processes", type=int, nargs="*", default=[], help="of the router, in turns")
    parser.add_argument(
        "--flush-ms", type=float, nargs="+", default=[0.0], help="router.flush_ms, with --processes"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the turns")
    parser.add_argument("--sections", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--serve-worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve-router", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    if options.serve_worker:
        asyncio.run(serve_worker(options.serve_worker, options.interval_ms[0] / 1e3))
    elif options.serve_router:
        port, scheduler_port, model = options.serve_router
        serve_router(
            model,
            int(port),
            int(scheduler_port),
            options.profile,
            json.loads(options.extra),
            json.loads(options.sections),
        )
    elif options.sample:
        compare_traced(options)
    elif options.processes:
        compare_processes(options)
    else:
        runs = []
        for interval_ms in options.interval_ms:
            runs.append(measure(options, interval_ms))
            print(json.dumps(runs[-1]), flush=True)
        save("router", {"runs": runs})


if __name__ == "__main__":  # its own child processes
    main(sys.argv[1:])
