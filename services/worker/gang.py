"""Tie a worker to its gang: meet its members before the engine loads, and drain and end with them."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from baton import addresses
from baton.protos import gang_pb2, gang_pb2_grpc, scheduler_pb2
from baton.scheduler.errors import SchedulerUnavailable
from baton.security.exposure import only_from_here
from baton.services.config import Settings
from baton.services.engine.data_parallel import GangRank, network_of, open_store
from baton.services.engine.errors import SiblingLost
from baton.services.errors import ConfigError, StartError
from baton.services.gang.link import GangLink, Leader, Member, Seat, Silence

LOOPBACK = "127.0.0.1"  # where the members meet, if all are on one machine
MEET_S = 600.0  # a member may be waiting for its restart
# Until all members serve, a member counts as dead after this many seconds without a message. After that, the
# schedulers' limit (scheduler.worker_lease_s) applies. The end of a process is noticed at once.
LOADING_SILENCE_S = 20.0


def gang_of(settings: Settings) -> scheduler_pb2.Gang | None:
    """Return the gang to join, if any, as the scheduler sees it: without limbs. Raises ConfigError."""
    own, engine = settings.worker, settings.engine
    size, why = engine.members, f"engine.data_parallel_size is {engine.data_parallel_size}"
    if engine.nodes > 1:
        why += f" and engine.nodes {engine.nodes}"
    if size == 1:
        if own.gang:
            raise ConfigError(f"worker.gang (value {own.gang!r}): {why}: set it to the gang's size")
        return None
    if not own.gang:
        raise ConfigError(
            f"{why}, and this worker has no gang: set worker.gang (--gang) to NAME/RANK, or let `baton up` "
            "or `baton node` start its members"
        )
    if own.gang_rank >= size:
        raise ConfigError(f"worker.gang (value {own.gang!r}): {why}: ranks are 0 to {size - 1}")
    return scheduler_pb2.Gang(
        name=own.gang_name, rank=own.gang_rank // engine.spread, size=engine.data_parallel_size
    )


def is_limb(settings: Settings) -> bool:
    """Return whether a process is a limb: it has ranks of another process's engine, and is no worker."""
    return settings.worker.gang_rank % settings.engine.spread > 0


async def own_host(settings: Settings, kv_host: str) -> str:
    """Return the IP at which members reach ranks here; kv_host: where KV is reached. Raises StartError."""
    if settings.engine.nodes == 1:
        return LOOPBACK
    try:
        found = await asyncio.get_running_loop().getaddrinfo(kv_host, None)
    except OSError as error:
        raise StartError(
            f"ranks on other machines could not reach this one: {kv_host!r} has no address ({error}); set "
            "worker.advertise or handoff.listen to one"
        ) from None
    own = str(found[0][4][0])
    schedulers = (addresses.split(one)[0] for one in settings.scheduler.address.split(","))
    if ipaddress.ip_address(own).is_loopback and not all(map(only_from_here, schedulers)):
        raise StartError(
            f"worker.listen (value {settings.worker.listen!r}): ranks on other machines cannot reach those "
            f"here at {own}: set worker.listen to 0.0.0.0:0, and handoff.listen and worker.advertise, if at "
            "all, to an address that they can reach"
        )
    network_of(own)
    return own


class WorkerGang:
    def __init__(
        self,
        identity: scheduler_pb2.WorkerIdentity,
        settings: Settings,
        rung: Callable[[int], None],
        leader_of: Callable[[str], Awaitable[str]],
        own_host: str,
    ) -> None:
        """rung: see GangLink; leader_of: asks the scheduler; own_host: see the function."""
        own = settings.worker
        seat = Seat(
            own.gang_name,
            own.gang_rank,
            settings.engine.members,
            identity.worker_id,
            _facts(identity, settings, own_host),
        )
        self._leader_of = leader_of
        self._own_host = own_host
        self._store: Any = None
        silence = Silence(LOADING_SILENCE_S, settings.scheduler.worker_lease_s)
        self.link: GangLink = (
            Member(seat, silence, rung, self._find)
            if seat.rank
            else Leader(seat, silence, rung, self._open_world)
        )
        self.life = ""  # the id of rank 0's worker, a slash and random text

    def add_to(self, server: Any) -> None:
        if isinstance(self.link, Leader):
            gang_pb2_grpc.add_GangServicer_to_server(self.link, server)  # type: ignore[no-untyped-call]

    async def meet(self) -> GangRank:
        """Wait for the other members. Raises StartError."""
        world = await self.link.meet(MEET_S)
        own, seat = self._own_host, self.link.seat
        if own == LOOPBACK != world.host:  # the engines trust whatever serves their store
            raise StartError(f"gang {seat.gang}: rank 0 names {world.host!r} as a place to meet, not {own}")
        self.life = world.life
        return GangRank(seat.rank, world.host, world.store_port, own)

    def serve(self) -> None:
        self.link.tell(gang_pb2.STAGE_SERVING)

    def drain(self) -> None:
        self.link.tell(gang_pb2.STAGE_DRAINING)

    async def end(self, within_s: float, failed: asyncio.Future[Any]) -> None:
        """Unless the engine `failed`, tell the gang that this worker is drained, and wait for the gang."""
        if not failed.done():
            self.link.tell(gang_pb2.STAGE_DRAINED)
            await self.drained(within_s, failed)
        if failed.done():
            await self.link.close()

    async def drained(self, within_s: float, failed: asyncio.Future[Any]) -> None:
        """Wait until all are drained, the gang is over or the engine `failed`, for at most `within_s`."""
        drained = asyncio.create_task(self.link.drained.wait())
        waited: list[asyncio.Future[Any]] = [drained, self.link.lost, failed]
        await asyncio.wait(waited, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()

    def check(self) -> None:
        """Raise SiblingLost if the gang is over."""
        if self.link.lost.done():
            raise self._loss()

    def on_loss(self, react: Callable[[SiblingLost], None]) -> None:
        self.link.lost.add_done_callback(lambda _: react(self._loss()))

    def _loss(self) -> SiblingLost:
        return SiblingLost(f"gang {self.link.seat.gang} is over: {self.link.lost.result()}")

    async def _find(self) -> str:
        try:
            return await self._leader_of(self.link.seat.gang)
        except SchedulerUnavailable as error:
            raise ConnectionError(str(error)) from None

    def _open_world(self) -> gang_pb2.World:
        host = self._own_host
        self._store = open_store(host)
        life = f"{self.link.seat.worker_id}/{uuid.uuid4().hex[:8]}"  # a pod's successor has the same id
        return gang_pb2.World(life=life, host=host, store_port=self._store.port)


def _facts(identity: scheduler_pb2.WorkerIdentity, settings: Settings, own_host: str) -> dict[str, str]:
    engine = settings.engine.model_dump(mode="json")
    extra = json.dumps(engine.pop("extra"), sort_keys=True)  # may hold a token
    near = ipaddress.ip_address(own_host).is_loopback
    return {
        "its machine (for several set engine.nodes and worker.listen)": identity.host if near else "any",
        # Prefill and decode may differ: a member may have been started before a change of role.
        "whether it is a mixed worker": str(identity.role == scheduler_pb2.ROLE_MIXED),
        "the model's fingerprint": identity.model_fingerprint,
        "vLLM's version": identity.vllm_version,
        "scheduler.worker_lease_s": str(settings.scheduler.worker_lease_s),
        "worker.drain_timeout_s": str(settings.worker.drain_timeout_s),
        "handoff.enabled": str(settings.handoff.enabled is not False),
        "handoff.kv_wire_dtype": settings.handoff.kv_wire_dtype,
        "engine.extra's digest": hashlib.sha256(extra.encode()).hexdigest()[:16],
        **{f"engine.{key}": json.dumps(value, sort_keys=True) for key, value in engine.items()},
    }
