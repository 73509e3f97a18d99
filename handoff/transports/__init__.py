"""Transports by name: Baton's own, and those that other packages add (docs/adding-a-transport.md)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from baton.handoff.errors import HandoffError, NoCommonTransport
from baton.handoff.transports.base import Transport
from baton.protos.handoff_pb2 import Shard
from baton.registry import Registry

logger = logging.getLogger(__name__)

REGISTRY: Registry[type[Transport]] = Registry(
    "handoff transport",
    Transport,
    {
        "shm": "baton.handoff.transports.shm:Shm",
        "grpc": "baton.handoff.transports.grpc:Grpc",
    },
    group="baton.handoff_transports",
    error=HandoffError,
)


def create(names: Iterable[str]) -> list[Transport]:
    """Make the transports of those names, in that order. Raises HandoffError for one that cannot be had."""
    made: list[Transport] = []
    for name in names:
        transport = REGISTRY.load(name)()
        if transport.name != name:
            raise HandoffError(
                f"handoff transport {name!r} calls itself {transport.name!r}: its package is wrong"
            )
        made.append(transport)
    return made


def withdraw(transports: Iterable[Transport], request_id: str, epoch: int) -> None:
    """Let each transport withdraw what it offered of a save."""
    for transport in transports:
        try:
            transport.withdraw(request_id, epoch)
        except Exception:  # another package's: it ends neither the thread nor the other transports
            logger.exception(
                "transport %r did not withdraw request %r",
                transport.name,
                request_id,
                extra={"request_id": request_id},
            )


def choose(transports: Sequence[Transport], shard: Shard) -> Transport:
    """Return the first that reaches the shard. Raises NoCommonTransport."""
    for transport in transports:
        if transport.reaches(shard):
            return transport
    here = ", ".join(transport.name for transport in transports)
    raise NoCommonTransport(
        f"rank {shard.rank} of the source at {shard.address or 'no address'} offers"
        f" {', '.join(sorted(shard.offers)) or 'nothing'}; none of this worker's transports reaches it: "
        f"{here}"
    )
