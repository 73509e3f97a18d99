"""The registry of transports: Baton's own, and those of other packages (docs/extending.md)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from baton.handoff.errors import HandoffError, NoCommonTransport
from baton.handoff.records import Bytes
from baton.handoff.transports.base import Transport
from baton.protos.handoff_pb2 import Shard
from baton.registry import Registry

if TYPE_CHECKING:  # it imports torch
    from baton.handoff.memory.streams import Device

logger = logging.getLogger(__name__)

REGISTRY: Registry[type[Transport]] = Registry(
    "handoff transport",
    Transport,
    {
        "shm": "baton.handoff.transports.shm:Shm",
        "nixl": "baton.handoff.transports.nixl:Nixl",
        "tcp": "baton.handoff.transports.tcp:Tcp",
    },
    group="baton.handoff_transports",
    former={"grpc": "tcp"},
    error=HandoffError,
)


BY_DEFAULT = ("shm", "nixl", "tcp")


def usable(names: Sequence[str] | None) -> list[str]:
    """Return the names of the transports to use here, best first.

    Without `names`, these are the ones in BY_DEFAULT that work and are worth using. Raises HandoffError if a
    named transport does not work here.
    """
    kinds = {name: REGISTRY.load(name) for name in names or BY_DEFAULT}
    hindrances = {
        name: kind.hindrance() or ("" if names else kind.needless()) for name, kind in kinds.items()
    }
    for name, hindrance in hindrances.items():
        if hindrance and names:
            raise HandoffError(f"handoff transport {name!r} cannot be used: {hindrance}")
        if hindrance:
            logger.info("handoff transport %r is not used: %s", name, hindrance)
    return [name for name, hindrance in hindrances.items() if not hindrance]


def possible() -> list[str]:
    """Return the names of Baton's own transports that work here, whether worth using or not."""
    return [name for name in BY_DEFAULT if not REGISTRY.load(name).hindrance()]


def create(names: Sequence[str] | None = None) -> list[Transport]:
    """Make the `usable` transports, in order. Raises HandoffError if a named one does not work here."""
    made: list[Transport] = []
    for name in usable(names):
        try:
            transport = REGISTRY.load(name)()
        except HandoffError as error:
            if names:
                raise
            logger.warning("handoff transport %r is not used: %s", name, error)
            continue
        if transport.name != name:
            raise HandoffError(
                f"handoff transport {name!r} calls itself {transport.name!r}: the package has a bug"
            )
        made.append(transport)
    return made


def register(transports: Iterable[Transport], memory: Bytes) -> None:
    for transport in transports:
        transport.register(memory)


def read_for(transports: Iterable[Transport], device: Device) -> None:
    for transport in transports:
        transport.reads_for(device)


def withdraw(transports: Iterable[Transport], request_id: str, epoch: int) -> None:
    for transport in transports:
        try:
            transport.withdraw(request_id, epoch)
        except Exception:  # a bug in another package must not end the thread
            logger.exception(
                "transport %r failed to withdraw request %r",
                transport.name,
                request_id,
                extra={"request_id": request_id},
            )


def close(transports: Iterable[Transport]) -> None:
    for transport in transports:
        try:
            transport.close()
        except Exception:  # a bug in another package must not keep the others open
            logger.exception("transport %r failed to close", transport.name)


def choose(transports: Sequence[Transport], shard: Shard) -> Transport:
    """Return the first transport that reaches the shard. Raises NoCommonTransport."""
    for transport in transports:
        if transport.reaches(shard):
            return transport
    here = ", ".join(transport.name for transport in transports)
    raise NoCommonTransport(
        f"rank {shard.rank} of the source at {shard.address or 'no address'} offers"
        f" {', '.join(sorted(shard.offers)) or 'nothing'}; none of this worker's transports reaches it: "
        f"{here}"
    )
