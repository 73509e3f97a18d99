"""The order for a load, from the scheduler's side to a rank's loader."""

from __future__ import annotations

from dataclasses import dataclass

from baton.handoff.groups import Part
from baton.protos.handoff_pb2 import Manifest

Key = tuple[str, int]  # request id, epoch


@dataclass(frozen=True)
class LoadJob:
    """An order to bring the KV of a save into these cache blocks, once its manifest is here."""

    request_id: str
    epoch: int
    tokens: int  # that the source saves: the manifest has to say the same
    parts: tuple[Part, ...]
    arrived_s: float  # at the engine; CLOCK_MONOTONIC
    saved_as: str = ""  # the id under which the source saved it; empty: request_id
    manifest: Manifest | None = None  # where it came before the blocks did
    complete: bool = False  # the prompt is, and the request waits for nothing but its KV

    @property
    def saved_id(self) -> str:
        """The id by which the source knows it."""
        return self.saved_as or self.request_id

    @property
    def key(self) -> Key:
        """Request id and epoch."""
        return self.request_id, self.epoch
