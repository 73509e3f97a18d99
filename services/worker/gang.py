"""Tie a worker to its gang: meet the others before the engine loads, and drain and end with them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.protos import gang_pb2, gang_pb2_grpc, scheduler_pb2
from baton.services.config import Settings
from baton.services.engine.errors import SiblingLost
from baton.services.errors import ConfigError, StartError
from baton.services.gang.link import GangLink, Leader, Member, Seat, Silence

if TYPE_CHECKING:  # see node.py
    from baton.services.engine.data_parallel import GangRank
    from baton.services.engine.host import EngineHost

HOST = "127.0.0.1"  # where the engines meet: a gang is served on one machine
MEET_S = 600.0  # a member may be waiting for its restart
# Seconds without a message after which a member counts as dead until all serve. After that schedulers' limit
# (scheduler.worker_lease_s) holds. The end of a process is noticed at once.
LOADING_SILENCE_S = 20.0


def gang_of(settings: Settings) -> scheduler_pb2.Gang | None:
    """Return the gang that a worker is to join, if any. Raises ConfigError if the settings disagree."""
    own, size = settings.worker, settings.engine.data_parallel_size
    if size == 1:
        if own.gang:
            raise ConfigError(
                f"worker.gang (value {own.gang!r}): engine.data_parallel_size is 1: set it to the gang's size"
            )
        return None
    if not own.gang:
        raise ConfigError(
            f"engine.data_parallel_size is {size}, and this worker has no gang: name it with worker.gang "
            "(--gang) and its rank with worker.gang_rank, or let `baton up` start them all"
        )
    if own.gang_rank >= size:
        raise ConfigError(
            f"worker.gang_rank (value {own.gang_rank}): engine.data_parallel_size is {size}: ranks are 0 to "
            f"{size - 1}"
        )
    return scheduler_pb2.Gang(name=own.gang, rank=own.gang_rank, size=size)


class WorkerGang:
    """The gang of one worker."""

    def __init__(
        self,
        identity: scheduler_pb2.WorkerIdentity,
        settings: Settings,
        host: EngineHost,
        ask: Callable[[], None],
    ) -> None:
        """ask: has the scheduler tell the `leader` soon."""
        mine = identity.gang
        seat = Seat(mine.name, mine.rank, mine.size, identity.worker_id, _facts(identity, settings))
        self.leader = ""  # address of rank 0's worker; empty while it is unknown
        self._ask = ask
        self._store: Any = None
        self._rank = mine.rank
        silence = Silence(LOADING_SILENCE_S, settings.scheduler.worker_lease_s)
        self.link: GangLink = (
            Member(seat, silence, host.rung, self._find)
            if mine.rank
            else Leader(seat, silence, host.rung, self._open_world)
        )
        self.life = ""

    def add_to(self, server: Any) -> None:
        """Serve the other members, if this is rank 0."""
        if isinstance(self.link, Leader):
            gang_pb2_grpc.add_GangServicer_to_server(self.link, server)  # type: ignore[no-untyped-call]

    async def meet(self) -> GangRank:
        """Wait for the others. Raises StartError."""
        from baton.services.engine.data_parallel import GangRank

        world = await self.link.meet(MEET_S)
        if world.host != HOST:  # the engines trust whatever serves their store
            raise StartError(
                f"gang {self.link.seat.gang}: rank 0 names {world.host!r} as a place to meet, not {HOST}"
            )
        self.life = world.life
        return GangRank(self._rank, world.host, world.store_port)

    def serve(self) -> None:
        """Tell that this worker's engine is loaded."""
        self.link.tell(gang_pb2.STAGE_SERVING)

    def drain(self) -> None:
        """Have the others drain, too."""
        self.link.tell(gang_pb2.STAGE_DRAINING)

    async def end(self, within_s: float, failed: asyncio.Future[Any]) -> None:
        """Tell that this worker is drained, and wait until all are, or `within_s` seconds.

        failed: this worker's engine has failed; then leave at once, because the others wait for it.
        """
        if not failed.done():
            self.link.tell(gang_pb2.STAGE_DRAINED)
            drained = asyncio.create_task(self.link.drained.wait())
            waited: list[asyncio.Future[Any]] = [drained, self.link.lost, failed]
            await asyncio.wait(waited, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            drained.cancel()
        if failed.done():
            await self.link.close()

    def check(self) -> None:
        """Raise SiblingLost if the gang is over."""
        if self.link.lost.done():
            raise self._loss()

    def on_loss(self, react: Callable[[SiblingLost], None]) -> None:
        self.link.lost.add_done_callback(lambda _: react(self._loss()))

    def _loss(self) -> SiblingLost:
        return SiblingLost(f"gang {self.link.seat.gang} is over: {self.link.lost.result()}")

    async def _find(self) -> str:
        self._ask()
        return self.leader

    def _open_world(self) -> gang_pb2.World:
        from baton.services.engine.data_parallel import open_store

        self._store = open_store(HOST)
        return gang_pb2.World(life=self.link.seat.worker_id, host=HOST, store_port=self._store.port)


def _facts(identity: scheduler_pb2.WorkerIdentity, settings: Settings) -> dict[str, str]:
    """Return the facts that must be equal in all members, as texts."""
    engine = settings.engine.model_dump(mode="json")
    extra = json.dumps(engine.pop("extra"), sort_keys=True)  # may hold a token
    return {
        "its machine": identity.host,
        # Prefill and decode may differ: a member may have been started before a change of role.
        "whether it is a mixed worker": str(identity.role == scheduler_pb2.ROLE_MIXED),
        "the model's fingerprint": identity.model_fingerprint,
        "vLLM's version": identity.vllm_version,
        "engine.extra's digest": hashlib.sha256(extra.encode()).hexdigest()[:16],
        **{f"engine.{key}": json.dumps(value, sort_keys=True) for key, value in engine.items()},
    }
