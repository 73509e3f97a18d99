"""The choice among revisions, while a deployment is upgraded."""

from __future__ import annotations

from typing import ClassVar

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.need import Need
from baton.scheduler.policy.base import Filter, Side
from baton.scheduler.types import WorkerRecord


class SameRevision(Filter):
    """The worker runs the vLLM whose messages the router speaks, and the weights that began the output."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_NO_WORKERS
    reason: ClassVar[str] = (
        "those that are ready run another vLLM than the router, or other weights than began the output"
    )

    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        del side
        one = worker.identity
        return need.vllm_version in ("", one.vllm_version) and need.model_fingerprint in (
            "",
            one.model_fingerprint,
        )
