"""Run a limb: the ranks of a worker's engine on another machine.

A limb takes no requests, and the scheduler does not know of it. It is a member of the worker's gang, from
which it learns where the ranks meet, and with which it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from baton import addresses, rpc
from baton.protos import gang_pb2, scheduler_pb2
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import Refused
from baton.services.config import Settings
from baton.services.engine.adapters import AdapterFiles
from baton.services.engine.args import VLLM_VERSION
from baton.services.engine.errors import EngineFailed
from baton.services.errors import PeerRefused
from baton.services.roles import Role
from baton.services.worker.advertise import advertised
from baton.services.worker.gang import WorkerGang, gang_of, own_host
from baton.services.worker.starting import Stopped, preloaded, stop_on_signals, unless_stopped

logger = logging.getLogger(__name__)

SCHEDULER_WAIT_S = 60.0


class Limb:
    """A limb's process. `run` once."""

    def __init__(
        self,
        settings: Settings,
        role: Role,
        worker_id: str,
        fingerprint: str,
        preload: Callable[[], None],
        *,
        adapters: tuple[AdapterFiles, ...] = (),
    ) -> None:
        self._settings = settings
        self._role = role
        self._preload = preload
        self._adapters = adapters
        self._identity = scheduler_pb2.WorkerIdentity(
            worker_id=worker_id,
            role=role.wire,
            host=rpc.host_id(),
            model_fingerprint=fingerprint,
            vllm_version=VLLM_VERSION,
            gang=gang_of(settings),
        )

    async def run(self) -> int:
        """Run until the gang ends; return the exit status. Raises StartError, PeerRefused, EngineFailed."""
        stop = stop_on_signals()
        listen, _ = addresses.split(self._settings.worker.listen)
        rpc.check_exposure("handoff.listen", self._settings.handoff.host or listen)
        found = await advertised(self._settings, 0, SCHEDULER_WAIT_S)
        own = await own_host(self._settings, found.kv_host)
        async with SchedulerClient(self._settings.scheduler.address) as client:
            gang = WorkerGang(self._identity, self._settings, lambda _: None, client.leader_of, own)
            try:
                await self._live(stop, gang, found.kv_host)
            except Stopped:
                pass
            except Refused as error:
                raise PeerRefused(f"the scheduler refuses this limb: {error}") from None
            finally:
                await gang.link.close()
        return 0

    async def _live(self, stop: asyncio.Event, gang: WorkerGang, kv_host: str) -> None:
        await unless_stopped(preloaded(self._preload), "importing vLLM", stop, gang)
        from baton.services.engine.build import EnginePlan
        from baton.services.engine.limb import LimbHost

        rank = await unless_stopped(gang.meet(), "waiting for the rest of its gang", stop, gang)
        plan = EnginePlan(
            self._settings,
            gang.life.rsplit("/", 1)[0],  # the worker's id, as for the worker's own ranks
            self._identity.model_fingerprint,
            needs_handoffs=self._role.needs_handoffs,
            adapters=self._adapters,
            kv_host=kv_host,
            gang=rank,
        )
        host = LimbHost(plan)
        logger.info("loading %s for %s", self._settings.engine.model, gang.life)
        await unless_stopped(host.start(), "loading", stop, gang)
        gang.serve()
        logger.info("ready")
        await self._serve(stop, gang, host.failed)

    async def _serve(
        self, stop: asyncio.Event, gang: WorkerGang, failed: asyncio.Future[EngineFailed]
    ) -> None:
        link = gang.link
        ends = [asyncio.create_task(event.wait()) for event in (stop, link.draining)]
        waited: list[asyncio.Future[Any]] = [*ends, link.lost, failed]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        if not failed.done() and not link.lost.done():
            link.tell(gang_pb2.STAGE_DRAINED)  # also lets the others drain
            # The worker drains for drain_timeout_s, and then waits as long again for the gang.
            await gang.drained(2 * self._settings.worker.drain_timeout_s, failed)
        if failed.done():
            raise EngineFailed(f"the engine failed: {failed.result()}") from failed.result()
        gang.check()
