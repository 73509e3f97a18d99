"""Answer operators, who ask a worker through the scheduler about its machine and for handoff trials."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from baton import addresses, machine
from baton.protos import handoff_pb2, scheduler_pb2, worker_pb2

TRIAL_TIMEOUT_S = 15.0  # the ranks have shorter deadlines of their own


class Ranks(Protocol):
    """The part of the engine's host that is needed here."""

    @property
    def kv_addresses(self) -> list[str]:
        """Addresses of the ranks' Handoff services, as this machine dials them."""

    def try_handoff(
        self, sources: Sequence[str], transport: str, size: int, timeout_s: float
    ) -> handoff_pb2.TrialReply:
        """Have the ranks pull test payloads; blocks."""


class OperatorDesk:
    """Answers of one worker. Used in the event loop."""

    def __init__(self, ranks: Ranks, kv_host: str) -> None:
        """kv_host: the host under which others find the ranks' services."""
        self._ranks = ranks
        self._kv_host = kv_host

    async def inspect(self) -> scheduler_pb2.Inspection:
        """Describe this process and its machine."""
        found = await asyncio.to_thread(machine.inspection)
        for address in self._ranks.kv_addresses:
            host, port = addresses.split(address)
            found.kv_addresses.append(addresses.join(self._kv_host or host, port))
        return found

    async def try_handoff(self, request: worker_pb2.TryHandoffRequest) -> handoff_pb2.TrialReply:
        return await asyncio.to_thread(
            self._ranks.try_handoff,
            list(request.sources),
            request.transport,
            request.bytes,
            TRIAL_TIMEOUT_S,
        )
