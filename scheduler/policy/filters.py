"""The built-in filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from baton.facts import unlike
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import (
    could_decode,
    could_prefill,
    decode_bound,
    may_decode,
    may_prefill,
    prefill_bound,
)
from baton.scheduler.need import Need
from baton.scheduler.policy.base import Filter, PairFilter, Side
from baton.scheduler.types import WorkerRecord


class Placeable(Filter):
    """Require that the worker is ready and not drained."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_NO_WORKERS
    reason: ClassVar[str] = "none is ready"

    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        del need, side
        return worker.placeable


class NotExcluded(Filter):
    """Require that the worker has not failed an earlier attempt at this request."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_NO_WORKERS
    reason: ClassVar[str] = "all that are ready failed an earlier attempt"

    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        del side
        return worker.worker_id not in need.exclude


class Fits(Filter):
    """Require that the worker could run the request if it were idle."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_TOO_LARGE
    reason: ClassVar[str] = "the prompt is longer than the model's limit or the KV cache"

    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        prefills = not side.prefills or could_prefill(need, worker)
        return prefills and (not side.decodes or could_decode(need, worker))


class HasRoom(Filter):
    """Require that the worker has room now. A rejection names the limit and its key."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_FULL
    reason: ClassVar[str] = "all are full"

    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        prefills = not side.prefills or may_prefill(need, worker, self.limits)
        return prefills and (not side.decodes or may_decode(need, worker, self.limits))

    def why(self, workers: Sequence[WorkerRecord], need: Need, side: Side) -> str:
        first = workers[0]
        if side.prefills and not may_prefill(need, first, self.limits):
            bound = prefill_bound(need, first, self.limits)
        else:
            bound = decode_bound(need, first, self.limits)
        return f"{self.reason} ({first.worker_id}: {bound})"


class SameRevision(Filter):
    """Require the router's version of vLLM, and the weights that generated the first tokens."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_NO_WORKERS
    reason: ClassVar[str] = (
        "all that are ready run a different vLLM than the router, or not the weights that began the output"
    )

    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        del side
        one = worker.identity
        return need.vllm_version in ("", one.vllm_version) and need.model_fingerprint in (
            "",
            one.model_fingerprint,
        )


class HasAdapter(Filter):
    """Require the request's adapter, with the same files as at the router."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_NO_WORKERS
    reason: ClassVar[str] = "all that are ready lack the adapter"

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


class Compatible(PairFilter):
    """Require equal weights, compatible KV and a common transport. Ranks may differ."""

    def keeps(self, prefill: WorkerRecord, decode: WorkerRecord) -> bool:
        ours, theirs = prefill.capacity, decode.capacity
        if prefill.identity.model_fingerprint != decode.identity.model_fingerprint:
            return False
        if ours.compatibility_hash != theirs.compatibility_hash:
            return False
        return any(one in theirs.transports for one in ours.transports)

    def explain(self, prefill: WorkerRecord, decode: WorkerRecord) -> str:
        ours, theirs = prefill.capacity, decode.capacity
        names = f"prefill worker {prefill.worker_id} and decode worker {decode.worker_id}"
        one, other = prefill.identity.model_fingerprint, decode.identity.model_fingerprint
        if one != other:
            revisions = f"{one[:12]}, {other[:12]}"
            return f"{names} have different weights ({revisions}): start workers of both roles with each"
        prefills, decodes = ((one.compatibility_hash, one.facts) for one in (ours, theirs))
        if why := unlike(prefills, decodes, ("on prefill", "on decode")):
            return f"{names} store KV differently ({why}): start them with the same engine settings"
        offered = f"{', '.join(ours.transports) or 'none'}; {', '.join(theirs.transports) or 'none'}"
        return f"{names} share no transport ({offered}): give them a common one"
