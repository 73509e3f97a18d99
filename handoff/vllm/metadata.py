"""What the connector's two sides tell each other through vLLM: plain picklable data.

Leans on vllm.distributed.kv_transfer.kv_connector.v1.base: KVConnectorMetadata, KVConnectorWorkerMetadata,
KVConnectorHandshakeMetadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from baton.handoff.load.loader import Key, LoadJob
from baton.handoff.reports import ShardLoad, ShardSave
from baton.handoff.save.saver import SaveJob


@dataclass
class StepJobs(KVConnectorMetadata):
    """Scheduler to ranks: what one engine step has to do."""

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    cancels: list[Key] = field(default_factory=list)  # loads of earlier steps whose requests ended


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """Ranks to scheduler: what has been done."""

    saves: list[ShardSave] = field(default_factory=list)
    loads: list[ShardLoad] = field(default_factory=list)
    staging: dict[int, tuple[int, int]] = field(default_factory=dict)  # by rank: blocks free, and in all

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResults:
        if not isinstance(other, StepResults):
            raise TypeError(f"cannot aggregate {type(other).__name__} with StepResults")
        return StepResults(self.saves + other.saves, self.loads + other.loads, self.staging | other.staging)


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """A rank to the scheduler, once, when its cache is there."""

    rank: int
    address: str  # of its Handoff service, as a process of this machine dials it
    compatibility_hash: str
    facts: Mapping[str, str]  # what the hash is made of, in words
    layers: tuple[bytes, ...]  # serialized handoff.Layer
