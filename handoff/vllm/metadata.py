"""Messages between the connector's two sides, which vLLM carries: plain picklable data.

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

from baton.handoff.load.job import Key, LoadJob
from baton.handoff.reports import ShardLoad, ShardSave
from baton.handoff.save.saver import SaveJob
from baton.protos.handoff_pb2 import Manifest


@dataclass
class StepJobs(KVConnectorMetadata):
    """Carry the work of one engine step from the scheduler to the ranks."""

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    begins: list[tuple[Key, Manifest]] = field(default_factory=list)  # loads that now have a manifest
    completes: list[tuple[Key, Manifest]] = field(default_factory=list)  # loads whose requests can go on
    cancels: list[Key] = field(default_factory=list)  # loads whose requests ended
    drops: list[Key] = field(default_factory=list)  # saves whose prompts are not computed any further
    preempted: list[Key] = field(default_factory=list)  # requests whose blocks this step may write to
    # requests whose blocks are kept until everything is copied
    ended: list[Key] = field(default_factory=list)


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """Carry the results of a step from the ranks to the scheduler."""

    saves: list[ShardSave] = field(default_factory=list)
    loads: list[ShardLoad] = field(default_factory=list)
    staging: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> (free blocks, all blocks)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResults:
        if not isinstance(other, StepResults):
            raise TypeError(f"cannot aggregate {type(other).__name__} with StepResults")
        return StepResults(self.saves + other.saves, self.loads + other.loads, self.staging | other.staging)


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """Describe a rank to the scheduler, once, when its cache exists."""

    rank: int
    address: str  # its Handoff service, as processes of this machine dial it
    slots: int  # size of staging
    windows: bool  # whether one of its transports moves saves with fewer slots than records
    compatibility_hash: str
    facts: Mapping[str, str]  # the hash's ingredients in words
