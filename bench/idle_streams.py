"""The cost of streams between routers' processes and workers that carry nothing: CPU and memory of each side.

    python -m bench idle-streams

Each process of a router has a stream of its own to each worker that it uses (closed after a minute without
requests). Here one process stands for a worker with the streams of many router processes, another one for a
router's process with the streams to many workers; the streams are real ones, without engines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
import psutil

from baton.protos import scheduler_pb2, worker_pb2, worker_pb2_grpc
from baton.rpc import SERVER_OPTIONS
from baton.services.router.stream import WorkerStream
from harness.stats import save

HEARTBEAT_S = 1.0  # scheduler.heartbeat_s: a worker's sign of life on a stream that is silent


class Idle(worker_pb2_grpc.WorkerServicer):
    """A worker that has nothing to say but that it lives."""

    async def Hello(self, request: Any, context: Any) -> worker_pb2.HelloReply:
        """Accept any router."""
        del context
        return worker_pb2.HelloReply(protocol=request.protocol)

    async def Run(self, requests: Any, context: Any) -> None:
        """Send signs of life until the router ends the stream."""
        del requests
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await context.write(worker_pb2.RunReply())


def serve(pipe: Connection, streams: int) -> None:
    """Be the worker's process, with a port for each stream: gRPC shares a connection to one address."""

    async def run() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(Idle(), server)  # type: ignore[no-untyped-call]
        ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(streams)]
        await server.start()
        pipe.send(ports)
        await server.wait_for_termination()

    asyncio.run(run())


def used(pid: int) -> tuple[float, int]:
    """Return a process's CPU time in seconds, and its resident bytes."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    return times.user + times.system, process.memory_info().rss


def _ended(stream: WorkerStream, lost: bool) -> None:
    del stream, lost  # `measure` looks


async def measure(ports: list[int], pids: dict[str, int], seconds: float) -> dict[str, Any]:
    """Return what both processes use with a stream open to each port."""
    hello = worker_pb2.HelloRequest(router_id="r", protocol=1)
    opened = []
    for port in ports:
        worker = scheduler_pb2.Worker(worker_id=f"w{port}", address=f"127.0.0.1:{port}")
        stream = WorkerStream(worker, lambda raw: raw, _ended)
        await stream.open(hello)
        opened.append(stream)
    before, began = {name: used(pid) for name, pid in pids.items()}, time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    found: dict[str, Any] = {"streams": len(ports), "lost": sum(one.ended for one in opened)}
    for name, pid in pids.items():
        cpu, rss = used(pid)
        found[f"{name}_cpu_ms_a_s"] = round(1e3 * (cpu - before[name][0]) / took, 2)
        found[f"{name}_rss_mib"] = round(rss / 2**20, 1)
    await asyncio.gather(*(one.close() for one in opened))
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[0, 100, 1000])
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args(arguments)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    worker = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, max(options.streams)), daemon=True
    )
    worker.start()
    ports = ours.recv()
    pids = {"router": os.getpid(), "worker": worker.pid or 0}
    runs = []
    for streams in options.streams:
        runs.append(asyncio.run(measure(ports[:streams], pids, options.seconds)))
        print(json.dumps(runs[-1]), flush=True)
    worker.kill()
    save("idle-streams", {"runs": runs})
