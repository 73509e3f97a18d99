"""The order for a load, from the scheduler's side to a rank's loader."""

from __future__ import annotations

from dataclasses import dataclass

from baton.handoff.groups import Part
from baton.protos.handoff_pb2 import Manifest

Key = tuple[str, int]  # request id, epoch


@dataclass(frozen=True)
class LoadJob:
    """Load a save into these cache blocks, once its manifest is here."""

    request_id: str
    epoch: int
    tokens: int  # must equal the manifest's
    parts: tuple[Part, ...]
    arrived_s: float  # arrival at the engine; CLOCK_MONOTONIC
    saved_as: str = ""  # request id at the source, if different
    manifest: Manifest | None = None  # set if it came before the blocks were allocated
    complete: bool = False  # the prompt is complete: the request waits only for its KV

    @property
    def saved_id(self) -> str:
        """The request id at the source."""
        return self.saved_as or self.request_id

    @property
    def key(self) -> Key:
        return self.request_id, self.epoch
