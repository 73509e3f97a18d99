"""The choice among workers with different LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.need import Need
from baton.scheduler.policy.base import Filter, Side
from baton.scheduler.types import WorkerRecord


class HasAdapter(Filter):
    """The worker has the adapter that the request is for, with the files that its router knows."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_NO_WORKERS
    reason: ClassVar[str] = "those that are ready do not have the adapter"

    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        del side
        wanted = need.adapter
        return wanted is None or worker.capacity.adapters.get(wanted.name) == wanted.fingerprint

    def why(self, workers: Sequence[WorkerRecord], need: Need, side: Side) -> str:
        del side
        name = need.adapter.name if need.adapter else ""
        others = [one.worker_id for one in workers if name in one.capacity.adapters]
        if others:
            return f"{others[0]} has other files than the router under the adapter's name {name!r}"
        return f"{workers[0].worker_id} does not have the adapter {name!r} (engine.lora)"
