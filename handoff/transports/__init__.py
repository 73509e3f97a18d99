"""Transports by name, imported when first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

from baton.handoff.errors import HandoffError, NoCommonTransport
from baton.handoff.transports.base import Transport
from baton.protos.handoff_pb2 import Shard

_REGISTRY: dict[str, tuple[str, str]] = {}


def register(name: str, module: str, cls: str) -> None:
    """Offer a transport under a name. Raises HandoffError for a name that is taken."""
    if name in _REGISTRY:
        raise HandoffError(f"transport {name!r} is registered already, as {'.'.join(_REGISTRY[name])}")
    _REGISTRY[name] = (module, cls)


def names() -> list[str]:
    return list(_REGISTRY)


def create(wanted: Iterable[str]) -> list[Transport]:
    """The transports of those names, in that order. Raises HandoffError for an unknown one."""
    made: list[Transport] = []
    for name in wanted:
        if name not in _REGISTRY:
            raise HandoffError(f"unknown transport {name!r}; registered: {', '.join(_REGISTRY)}")
        module, cls = _REGISTRY[name]
        made.append(getattr(importlib.import_module(module), cls)())
    return made


def choose(transports: Sequence[Transport], shard: Shard) -> Transport:
    """The first that reaches the shard. Raises NoCommonTransport."""
    for transport in transports:
        if transport.reaches(shard):
            return transport
    here = ", ".join(transport.name for transport in transports)
    raise NoCommonTransport(
        f"rank {shard.rank} of the source at {shard.address or 'no address'} (host {shard.host}, segment"
        f" {shard.segment or 'none'}) offers none of this worker's transports: {here}"
    )


register("shm", "baton.handoff.transports.shm", "SharedMemory")
register("grpc", "baton.handoff.transports.grpc", "Grpc")
register("mock", "baton.handoff.transports.mock", "Mock")
