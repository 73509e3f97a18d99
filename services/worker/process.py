"""Run one worker's services in order: register, load, serve, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton import addresses, rpc
from baton.enums import role_name
from baton.handoff import transports
from baton.handoff.reports import Staged
from baton.keeping import keep
from baton.levels import set_level
from baton.metrics import MetricsServer
from baton.protos import scheduler_pb2, worker_pb2, worker_pb2_grpc
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.worker_session import WorkerSession
from baton.services import roles
from baton.services.config import Settings
from baton.services.engine.adapters import AdapterFiles
from baton.services.engine.args import VLLM_VERSION, served_model_name
from baton.services.engine.errors import EngineFailed
from baton.services.errors import PeerRefused, StartError, describe
from baton.services.roles import Role
from baton.services.worker.advertise import advertised
from baton.services.worker.gang import WorkerGang, gang_of, own_host
from baton.services.worker.metrics import WorkerMetrics
from baton.services.worker.starting import Stopped, preloaded, stop_on_signals, unless_stopped

if TYPE_CHECKING:  # a worker registers before it imports vLLM, which takes seconds
    from baton.services.engine.grammars.house import GrammarHouse
    from baton.services.engine.host import EngineHost
    from baton.services.engine.info import EngineInfo
    from baton.services.worker.dispatcher import Dispatcher
    from baton.services.worker.drafting import Drafting
    from baton.services.worker.grammars import Grammars

logger = logging.getLogger(__name__)

T = TypeVar("T")

# All in seconds.
SCHEDULER_WAIT_S = 60.0  # wait for a scheduler at the start
ENGINE_STALL_S = 300.0  # a step that takes longer counts as hung
STAGED_TIMEOUT_S = 0.8
POLL_S = 0.02  # while draining
FLUSH_S = 1.0  # limit for sending the last replies to routers
# Time for routers to read their last replies before their streams end: gRPC drops unread ones.
LAST_WORDS_S = 0.2
SERVER_GRACE_S = 1.0
QUICK_S = 0.5  # the slowest heartbeat from which the clock offset is taken; the error is at most half

_HEALTH_NAMES = ("", worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class WorkerProcess:
    """A worker's process, from its first port to its last reply. `run` once."""

    def __init__(
        self,
        settings: Settings,
        role: Role,
        names: tuple[str, str],  # the id, and the name, which is the same after a restart
        fingerprint: str,
        preload: Callable[[], None],
        *,
        adapters: tuple[AdapterFiles, ...] = (),
        house: GrammarHouse,
    ) -> None:
        self._house = house
        self._adapters = adapters
        self._settings = settings
        self._role = role
        self._preload = preload
        self._identity = scheduler_pb2.WorkerIdentity(
            worker_id=names[0],
            name=names[1],
            role=role.wire,
            host=rpc.host_id(),
            model=served_model_name(settings.engine),
            model_fingerprint=fingerprint,
            vllm_version=VLLM_VERSION,
            gang=gang_of(settings),
        )
        self._gang: WorkerGang | None = None
        self._metrics = WorkerMetrics()
        self._handed_back = 0  # requests returned to routers when the drain timed out
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._dispatcher: Dispatcher | None = None
        self._drafting: Drafting | None = None
        self._kv_host = ""  # host at which other workers reach saved KV
        self._staged = Staged()  # as of the last look
        self._fence = 0  # the fence of the last autoscaler that changed the role

    async def run(self) -> int:
        """Run; return the exit status. Raises StartError, PeerRefused, ConfigError, EngineFailed."""
        self._stop = stop_on_signals()
        server = rpc.aio_server()
        port = self._bind(server)
        deadline = time.monotonic() + SCHEDULER_WAIT_S
        await self._advertise(port)
        own = self._settings.worker
        async with contextlib.AsyncExitStack() as stack:
            serving = MetricsServer(
                self._metrics.registry, "worker.metrics_port", own.listen, own.metrics_port
            )
            stack.enter_context(serving)
            host, _ = addresses.split(self._identity.address)
            self._identity.metrics_address = serving.reached_at(host)
            logger.info("metrics on http://%s/metrics", serving.address)
            client = await stack.enter_async_context(SchedulerClient(self._settings.scheduler.address))
            session = WorkerSession(client, self._identity, self._load, self._on_heartbeat)
            try:
                await session.start(max(0.0, deadline - time.monotonic()))
                return await self._live(server, session)
            except Stopped:
                return 0
            except Refused as error:
                raise PeerRefused(f"the scheduler refuses this worker: {error}") from None
            except SchedulerUnavailable as error:
                raise StartError(str(error)) from None
            finally:
                await session.close()
                await server.stop(SERVER_GRACE_S)

    async def _live(self, server: grpc.aio.Server, session: WorkerSession) -> int:
        await self._unless_stopped(preloaded(self._preload), "importing vLLM")
        from baton.services.engine.build import EnginePlan
        from baton.services.engine.host import EngineHost
        from baton.services.worker.dispatcher import Dispatcher
        from baton.services.worker.drafting import Drafting, method_of
        from baton.services.worker.grammars import Grammars
        from baton.services.worker.servicer import WorkerServicer

        metrics = self._metrics
        mine = self._identity
        host = EngineHost(
            EnginePlan(
                self._settings,
                mine.worker_id,
                mine.model_fingerprint,
                needs_handoffs=self._role.needs_handoffs,
                encodes=not self._role.generates,
                adapters=self._adapters,
                kv_host=self._kv_host,
            )
        )
        method = method_of(self._settings.engine)
        spec = self._settings.engine.speculative_config
        if method is not None and spec is not None:
            self._drafting = Drafting(method, spec.acceptance_reference, metrics.registry)
        grammars = Grammars(host, self._house)
        dispatcher = self._dispatcher = Dispatcher(
            self._role, self._settings.scheduler, host, metrics, self._drafting, grammars=grammars
        )
        heartbeat_s = self._settings.scheduler.heartbeat_s
        become = partial(self._become, session)
        servicer = WorkerServicer(mine, dispatcher, heartbeat_s, become, host=host)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._set_health(_NOT_SERVING)
        if mine.HasField("gang"):
            own, ask = await own_host(self._settings, self._kv_host), session.client.leader_of
            self._gang = WorkerGang(mine, self._settings, host.rung, ask, own)
            self._gang.add_to(server)
        await server.start()
        return await self._run_engine(session, host, dispatcher, grammars)

    async def _run_engine(
        self, session: WorkerSession, host: EngineHost, dispatcher: Dispatcher, grammars: Grammars
    ) -> int:
        mine = self._identity
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(dispatcher.close)
            start = partial(host.start, dispatcher)
            if self._gang is not None:
                stack.push_async_callback(self._gang.link.close)
                met = await self._unless_stopped(self._gang.meet(), "waiting for the rest of its gang")
                start = partial(start, met, self._gang.link.ring)
                session.identity.gang.life = mine.gang.life = self._gang.life  # read by Hello
                session.revision += 1  # so that it registers again
                session.wake()
            logger.info("loading %s", self._settings.engine.model)
            info = await self._unless_stopped(start(), "loading")
            self._metrics.set_blocks(info.free_blocks if self._role.generates else 0)
            self._metrics.ask(lambda: host.staged(STAGED_TIMEOUT_S), lambda: host.dummy_steps)
            await grammars.open()
            dispatcher.open(info, self._adapters)
            mine.capacity.CopyFrom(self._capacity(info, host))  # read by Hello
            session.blocks = dispatcher.blocks if host.reports_blocks else None
            await session.ready(mine.capacity)
            await self._set_health(_SERVING)
            room = f"{info.num_blocks} KV blocks of {info.block_size} tokens"
            logger.info("ready on %s: %s", mine.address, room if self._role.generates else "images alone")
            lease_s = 2 * self._settings.scheduler.placement_lease_s
            for name, work in (
                ("watch saved KV", partial(self._watch_pinned, host)),
                ("watch for hung steps", partial(self._watch_steps, host, dispatcher)),
                ("renew leases", partial(dispatcher.renew_leases, lease_s / 3)),
            ):
                stack.callback(keep(work, name).cancel)
            await self._serve(session, dispatcher, host)
        return 0 if await asyncio.to_thread(host.stop) else 1

    # Serving and draining.

    async def _serve(self, session: WorkerSession, dispatcher: Dispatcher, host: EngineHost) -> None:
        events = [self._stop, session.draining]
        if self._gang is not None:
            self._gang.serve()
            events.append(self._gang.link.draining)
            self._gang.on_loss(lambda loss: dispatcher.on_failure(loss, ()))  # no request is at fault
        ends = [asyncio.create_task(event.wait()) for event in events]
        waited: list[asyncio.Future[Any]] = [*ends, dispatcher.failed]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        if not dispatcher.failed.done():
            session.drain()
            dispatcher.drain()
            if self._gang is not None:
                self._gang.drain()
            await self._set_health(_NOT_SERVING)
            await self._drain(dispatcher, host)
            if self._gang is not None:
                await self._gang.end(self._settings.worker.drain_timeout_s, dispatcher.failed)
        elif self._gang is not None:
            await self._gang.link.close()  # first, because the other members are waiting for this engine
        await self._flush(dispatcher)
        if dispatcher.failed.done() or self._handed_back:
            await asyncio.sleep(LAST_WORDS_S)
        dispatcher.hang_up()
        if dispatcher.failed.done():
            error = dispatcher.failed.result()
            raise EngineFailed(f"the engine failed: {describe(error)}") from error

    async def _drain(self, dispatcher: Dispatcher, host: EngineHost) -> None:
        began = time.monotonic()
        deadline = began + self._settings.worker.drain_timeout_s
        logger.info("draining: %d requests, %d handoffs to pull", dispatcher.requests, self._staged.handoffs)
        while time.monotonic() < deadline and not dispatcher.failed.done():
            if dispatcher.idle and await self._nothing_to_pull(dispatcher, host):
                logger.info("drained in %.1f s", time.monotonic() - began)
                return
            await asyncio.sleep(POLL_S)
        self._handed_back = dispatcher.abort_all()
        logger.warning("the drain timed out: %d requests are returned to their routers", self._handed_back)

    @staticmethod
    async def _nothing_to_pull(dispatcher: Dispatcher, host: EngineHost) -> bool:
        """Return whether no saved KV and no embeddings are waiting; False if that is unknown."""
        if host.shelf is not None:  # the shelf also keeps embeddings that nobody is waiting for
            return not dispatcher.outgoing.leased
        staged = await asyncio.to_thread(host.staged, STAGED_TIMEOUT_S)
        return staged is not None and staged.handoffs == 0

    async def _flush(self, dispatcher: Dispatcher) -> None:
        deadline = time.monotonic() + FLUSH_S
        while not dispatcher.flushed and time.monotonic() < deadline:  # noqa: ASYNC110 (sessions have no event)
            await asyncio.sleep(POLL_S)

    async def _watch_pinned(self, host: EngineHost) -> None:
        while True:
            staged = await asyncio.to_thread(host.staged, STAGED_TIMEOUT_S)
            if staged is not None:
                self._staged = staged
            await asyncio.sleep(self._settings.scheduler.heartbeat_s)

    async def _watch_steps(self, host: EngineHost, dispatcher: Dispatcher) -> None:
        while host.step_s < ENGINE_STALL_S:  # noqa: ASYNC110 (a hung thread sets no event)
            await asyncio.sleep(min(1.0, ENGINE_STALL_S / 4))
        dispatcher.on_failure(EngineFailed(f"a step takes longer than {ENGINE_STALL_S:g} s"))

    # Starting.

    async def _unless_stopped(self, step: Awaitable[T], what: str) -> T:
        return await unless_stopped(step, what, self._stop, self._gang)

    def _bind(self, server: grpc.aio.Server) -> int:
        listen = addresses.join(*addresses.split(self._settings.worker.listen))
        rpc.check_exposure("handoff.listen", self._settings.handoff.host or "127.0.0.1")
        port = rpc.listen(server, "worker.listen", listen)
        if not port:
            raise StartError(
                f"worker.listen: cannot listen on {listen}: the port is taken or the host is not this one; "
                "choose another, or port 0"
            )
        return port

    async def _advertise(self, port: int) -> None:
        found = await advertised(self._settings, port, SCHEDULER_WAIT_S)
        self._identity.address, self._kv_host = found.worker, found.kv_host
        listen = self._settings.worker.listen
        logger.info("listens on %s, advertises %s; its KV is at %s", listen, found.worker, found.kv_host)

    # Change of role.

    async def _become(self, session: WorkerSession, wire: scheduler_pb2.Role, fence: int) -> str:
        """Change the role; return why that is impossible, or an empty text.

        fence: the term of the autoscaler that orders it, 0 for an operator; an order of an earlier term is
        refused. If no scheduler answers, the change takes effect when one does.
        """
        name = role_name(wire)
        if not name or self._dispatcher is None:
            return f"role {wire} is not known here"
        if 0 < fence < self._fence:
            return f"the order is from an earlier autoscaler (fence {fence}, now {self._fence})"
        self._fence = max(fence, self._fence)
        role = roles.role(name)
        if why_not := "it is draining" if session.draining.is_set() else self._unable(role):
            return why_not
        try:
            await session.become(wire)
        except Refused as error:
            return f"the scheduler refuses it: {error}"
        was, self._role = self._role, role
        self._identity.role = wire
        self._dispatcher.become(role)
        logger.info("changed from a %s to a %s worker", was.name, role.name)
        return ""

    def _unable(self, role: Role) -> str:
        if not self._identity.HasField("capacity"):
            return "its engine is still loading"
        if role.generates != self._role.generates:
            return (
                f"a {self._role.name} worker cannot become a {role.name} worker, because encode workers have "
                "the model's vision tower alone: start another worker"
            )
        if not role.needs_handoffs or self._identity.capacity.compatibility_hash:
            return ""
        if self._settings.handoff.enabled is False:
            return (
                "it was started without handoffs (handoff.enabled), as `baton up` does with only mixed "
                "workers: start it with --handoff-enabled to change its role"
            )
        return "the KV cache of its model cannot be handed over, so it can only be a mixed worker"

    # Heartbeats and registration.

    def _load(self) -> scheduler_pb2.WorkerLoad:
        if self._dispatcher is None:
            return scheduler_pb2.WorkerLoad()
        load = self._dispatcher.load
        return scheduler_pb2.WorkerLoad(
            running=load.running,
            waiting=load.waiting,
            free_blocks=load.free_blocks,
            deferred=load.deferred,
            counts=self._dispatcher.counts.message(),
            pinned_handoffs=self._staged.handoffs,
            pinned_bytes=self._staged.bytes,
            staging_bytes=self._staged.capacity,
            dummy_steps=self._dispatcher.dummy_steps,
            embeddings=self._dispatcher.encodes.kept(),
            drafting=self._drafting.report() if self._drafting is not None and self._role.decodes else None,
        )

    def _on_heartbeat(self, reply: scheduler_pb2.HeartbeatReply, took_s: float) -> None:
        set_level(reply.log_level)
        if self._dispatcher is not None and (kept := self._dispatcher.encodes.kept()) is not None:
            self._metrics.on_kept(kept)
        if reply.clock_s and took_s < QUICK_S:
            self._metrics.clock_offset_seconds.set(reply.clock_s + took_s / 2 - time.time())
        if self._drafting is not None:
            self._drafting.hear(reply.peer_reference)

    def _capacity(self, info: EngineInfo, host: EngineHost) -> scheduler_pb2.Capacity:
        offered = transports.usable(self._settings.handoff.transports) if host.compatibility_hash else []
        return scheduler_pb2.Capacity(
            compatibility_hash=host.compatibility_hash,
            facts=host.facts,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            lookahead_tokens=info.lookahead_tokens,
            transports=offered,
            speculative_method=self._drafting.method.name if self._drafting is not None else "",
            hashing=host.hashing,
            adapters={one.name: one.fingerprint for one in self._adapters},
            steps=scheduler_pb2.StepLimits(**asdict(info.steps)),
        )

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in _HEALTH_NAMES:
            await self._health.set(name, status)
