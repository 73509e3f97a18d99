"""Messages that vLLM carries between the connector's two sides. They must be picklable.

Leans on: vllm.distributed.kv_transfer.kv_connector.v1.base.{KVConnectorMetadata, KVConnectorWorkerMetadata,
KVConnectorHandshakeMetadata}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from baton.handoff.load.pull import LoadJob
from baton.handoff.reports import Key, ShardLoad, ShardSave
from baton.handoff.save.saver import SaveJob
from baton.protos.handoff_pb2 import Manifest


@dataclass
class StepJobs(KVConnectorMetadata):
    """One engine step's orders to the ranks."""

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    begins: list[tuple[Key, Manifest]] = field(default_factory=list)  # loads that now have a manifest
    completes: list[tuple[Key, Manifest]] = field(default_factory=list)  # loads that may end
    cancels: list[Key] = field(default_factory=list)  # loads whose requests ended
    drops: list[Key] = field(default_factory=list)  # saves whose prompts will not be completed
    preempted: list[Key] = field(default_factory=list)  # requests whose blocks this step may overwrite
    ended: list[Key] = field(default_factory=list)  # requests whose blocks are kept until copied


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """A step's results from the ranks."""

    saves: list[ShardSave] = field(default_factory=list)
    loads: list[ShardLoad] = field(default_factory=list)
    staging: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> (free blocks, all blocks)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResults:
        if not isinstance(other, StepResults):
            raise TypeError(f"cannot aggregate {type(other).__name__} with StepResults")
        return StepResults(self.saves + other.saves, self.loads + other.loads, self.staging | other.staging)


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """A rank's description for the scheduler's side, sent once."""

    rank: int
    host: str  # its machine (rpc.host_id)
    local_address: str  # its Handoff service, as its machine dials it
    address: str  # its Handoff service, as other machines dial it
    slots: int  # size of staging
    windows: bool  # whether one of its transports supports windows
    compatibility_hash: str
    facts: Mapping[str, str]  # what the hash covers, in words
