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
    """From the scheduler to the ranks: the work of one engine step."""

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    begins: list[tuple[Key, Manifest]] = field(default_factory=list)  # loads that have a manifest now
    completes: list[tuple[Key, Manifest]] = field(default_factory=list)  # those whose requests can go on
    cancels: list[Key] = field(default_factory=list)  # loads whose requests ended
    drops: list[Key] = field(default_factory=list)  # saves whose prompts are computed no further
    preempted: list[Key] = field(default_factory=list)  # requests whose blocks this step may write to
    ended: list[Key] = field(default_factory=list)  # requests whose blocks are kept until all is copied


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """From the ranks to the scheduler: the results of a step."""

    saves: list[ShardSave] = field(default_factory=list)
    loads: list[ShardLoad] = field(default_factory=list)
    staging: dict[int, tuple[int, int]] = field(default_factory=dict)  # by rank: free blocks, and all blocks

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResults:
        if not isinstance(other, StepResults):
            raise TypeError(f"cannot aggregate {type(other).__name__} with StepResults")
        return StepResults(self.saves + other.saves, self.loads + other.loads, self.staging | other.staging)


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """From a rank to the scheduler, once, when its cache exists."""

    rank: int
    address: str  # of its Handoff service, as processes of this machine dial it
    slots: int  # of staging
    windows: bool  # whether a save may have fewer slots than records: one of its transports moves such
    compatibility_hash: str
    facts: Mapping[str, str]  # the hash's ingredients in words
