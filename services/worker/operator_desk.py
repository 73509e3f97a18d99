"""Answer operators' questions about a worker's machine, and run test handoffs for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from baton import addresses, machine
from baton.protos import handoff_pb2, scheduler_pb2, worker_pb2

TRIAL_TIMEOUT_S = 15.0  # the ranks' own deadlines are shorter


class Ranks(Protocol):
    """The methods of EngineHost that are used here."""

    @property
    def kv_addresses(self) -> list[str]:
        """Addresses of the ranks' Handoff services, as this machine dials them."""

    def try_handoff(
        self, sources: Sequence[str], transport: str, size: int, timeout_s: float
    ) -> handoff_pb2.TrialReply:
        """Let the ranks pull test payloads. Blocks."""


class OperatorDesk:
    def __init__(self, ranks: Ranks, kv_host: str) -> None:
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
