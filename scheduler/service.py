"""The scheduler's process: a gRPC server and its background tasks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Self

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton import addresses, signals, tasks
from baton.autoscale.goals import Goals
from baton.keeping import keep
from baton.metrics import MetricsServer, dialled
from baton.protos import scheduler_pb2 as pb
from baton.protos import scheduler_pb2_grpc as rpc
from baton.rpc import aio_server, host_id, listen
from baton.scheduler.autoscaler import BALANCE_AFTER_S, Autoscaler
from baton.scheduler.errors import ListenFailed
from baton.scheduler.knowledge import Knowledge
from baton.scheduler.members import members, targets
from baton.scheduler.metrics import Metrics
from baton.scheduler.placer import SharedTurns
from baton.scheduler.servicer import SchedulerServicer
from baton.scheduler.store import open_store
from baton.scheduler.types import SchedulerOptions

WATCH_S = 0.5  # interval of looks at the store and sweeps of expired entries
STOP_GRACE_S = 2.0  # time limit of calls under way when the server stops
_SERVING = health_pb2.HealthCheckResponse.SERVING

log = logging.getLogger(__name__)


class SchedulerServer:
    """Serve while entered. Placement does not depend on the store, which may come and go.

    The constructor raises BadPolicy, entering raises ListenFailed and StoreRefuses.
    """

    def __init__(
        self, options: SchedulerOptions, *, store_password: str = "", goals: Goals | None = None
    ) -> None:
        """Prepare a server. It changes roles or numbers of workers if the mode of `goals` says so."""
        self.metrics = Metrics()
        self.address = options.address  # has the actual port once entered
        self.store = open_store(options.store, options.topic, store_password)
        autoscales = goals is not None and goals.mode in ("advise", "on")
        balances = goals is not None and goals.mode == "roles"
        mine = self._servicer = SchedulerServicer(options, self.store, self.metrics, autoscales=autoscales)
        self._turns = SharedTurns(self.store, mine.placer.turns)
        self._knowledge = Knowledge(mine.prefixes, self.metrics.prefixes)
        # as of the last `_look`
        self._workers: list[pb.WorkerIdentity] = []
        self._expired = 0
        self._store_problem = ""
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server: grpc.aio.Server | None = None
        self._autoscaler: Autoscaler | None = None
        if autoscales or balances:
            self._autoscaler = Autoscaler(
                goals if autoscales else None,
                BALANCE_AFTER_S if balances else None,
                self.store,
                mine.roster,
                mine.members,
                settling=mine.settling,
                metrics=self.metrics,
            )
        self._tasks: list[asyncio.Task[None]] = []

    def targets(self, _: Mapping[str, Any]) -> bytes:
        """Return all scrape targets, for Prometheus' http_sd. Thread-safe."""
        return json.dumps(targets(members(self._workers, self._servicer.members.known))).encode()

    def introduce(self, mine: pb.Process) -> None:
        """Publish this process's entry."""
        self._servicer.members.introduce(mine)

    async def __aenter__(self) -> Self:
        try:
            await self.store.open()
            self._servicer.roster.drain(self.store.drained)
            self._look()
            self._server = aio_server()
            rpc.add_SchedulerServicer_to_server(self._servicer, self._server)  # type: ignore[no-untyped-call]
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
            self.address = _listen(self._server, self.address)
            await self._server.start()
        except BaseException:
            await self.store.close()
            raise
        await self._health.set("", _SERVING)
        self._tasks = [
            keep(self._watch_store, "scheduler-watch-store"),
            keep(self._watch_memory, "scheduler-watch-memory"),
        ]
        if self._autoscaler:
            self._tasks.append(keep(self._autoscaler.run, "scheduler-autoscale"))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._health.enter_graceful_shutdown()
        for task in self._tasks:
            await tasks.stop(task)
        await self._servicer.members.leave()
        self._servicer.hang_up()
        if self._server:
            await self._server.stop(STOP_GRACE_S)
        await self.store.close()

    async def _watch_store(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await self.store.tend()
            self._servicer.roster.drain(self.store.drained)
            await self._servicer.members.tend()
            if self._servicer.members.schedulers > 1:
                await self._turns.tend()
            await self._servicer.tend()

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._servicer.settling.tick()
            self._look()
            await self._knowledge.tend()

    def _look(self) -> None:
        """Update metrics, and expire leases even if nothing is placed."""
        self._servicer.ledger.sweep()
        view = self._servicer.roster.view()
        self.metrics.seen(view, len(self._servicer.ledger.live))
        self.metrics.leases_expired.inc(self._servicer.ledger.expired - self._expired)
        self.metrics.lost(view, self._servicer.roster.left(), unsure=bool(self._servicer.settling))
        self._knowledge.look(view)
        self._workers = [one.identity for one in view.workers.values()]
        self._servicer.members.hears(len(self._workers))
        self.metrics.store_up.set(not self.store.problem)
        if self.store.problem and not self._store_problem:
            self.metrics.store_losses.inc()
        self._expired, self._store_problem = self._servicer.ledger.expired, self.store.problem


async def serve(
    settings: SchedulerOptions,
    *,
    store_password: str = "",
    metrics_port: int = 0,
    goals: Goals | None = None,
    on_started: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run a scheduler until `stop` is set or, without it, until a signal.

    `metrics_port` serves metrics, and scrape targets at /targets. `on_started` gets the address (host:port)
    when the server listens. Raises what `SchedulerServer` and `MetricsServer` raise on entry.
    """
    if stop is None:
        stop = signals.until_ending()
    async with SchedulerServer(settings, store_password=store_password, goals=goals) as server:
        pages = {"/targets": server.targets}
        with MetricsServer(
            server.metrics.registry, "scheduler.metrics_port", settings.address, metrics_port, pages
        ) as exposed:
            name = dialled(server.address)
            where = exposed.reached_at(addresses.split(name)[0])
            server.introduce(pb.Process(id=name, kind="scheduler", host=host_id(), metrics_address=where))
            log.info("metrics on http://%s/metrics", exposed.address)
            log.info(
                "scheduler of topic %r on %s, store %s", settings.topic, server.address, server.store.name
            )
            if on_started:
                on_started(server.address)
            await stop.wait()


def _listen(server: grpc.aio.Server, address: str) -> str:
    try:
        host, port = addresses.split(address)
        port = listen(server, "scheduler.address", addresses.join(host, port))
    except ValueError:
        port = 0
    if not port:
        raise ListenFailed(
            f"the scheduler cannot listen on {address}: the port is taken or the host is not this one; "
            "set scheduler.address"
        )
    return addresses.join(host, port)
