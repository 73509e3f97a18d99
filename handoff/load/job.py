"""Define the order for a load, from the scheduler's side to a rank's loader."""

from __future__ import annotations

from dataclasses import dataclass

from baton.handoff.groups import Part
from baton.protos.handoff_pb2 import Manifest

Key = tuple[str, int]  # request id, epoch


@dataclass(frozen=True)
class LoadJob:
    """Order the KV of a save to be brought into these cache blocks, once its manifest is here."""

    request_id: str
    epoch: int
    tokens: int  # number that the source saves: the manifest has to agree
    parts: tuple[Part, ...]
    arrived_s: float  # arrival at the engine; CLOCK_MONOTONIC
    saved_as: str = ""  # the id under which the source saved it; empty: request_id
    manifest: Manifest | None = None  # set if it came before the blocks did
    complete: bool = False  # the prompt is complete, and the request waits only for its KV

    @property
    def saved_id(self) -> str:
        """The id by which the source knows it."""
        return self.saved_as or self.request_id

    @property
    def key(self) -> Key:
        return self.request_id, self.epoch
