"""Prepare an engine's outputs for the requests' routers, in place: nothing else uses them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm.v1.engine import FinishReason

from baton.handoff import reports
from baton.handoff.errors import SaveFailed
from baton.handoff.vllm.ec_connector import IMAGE_LOST
from baton.protos import worker_pb2
from baton.protos.worker_pb2 import Failed
from baton.services.engine import requests, wire
from baton.services.engine.grammars.metered import problem_of
from baton.services.engine.requests import Prepared

# Bytes of outputs in one reply; a single larger output is not sent. A message above rpc.MAX_MESSAGE_BYTES,
# twice as much, would end the stream with all its requests.
REPLY_BYTES = 32 << 20
_PLAIN_BYTES = 512  # size of an output without tokens and arrays
_TOKEN_BYTES = 5


def encode(outputs: Any, kept: Sequence[Any]) -> list[bytes]:
    """Split one router's outputs into pieces of at most about REPLY_BYTES."""
    outputs.scheduler_stats = None
    outputs.finished_requests = None
    pieces = []
    for outputs.outputs in _split(kept):
        pieces.append(wire.encode_outputs(outputs))
    return pieces


def size_of(output: Any) -> int:
    size = _PLAIN_BYTES + _TOKEN_BYTES * len(output.new_token_ids)
    for arrays in (output.new_logprobs, output.new_prompt_logprobs_tensors):
        if arrays is not None:
            size += sum(int(array.nbytes) for array in arrays[:3])
    for array in (output.prompt_token_id_logprobs, output.routed_experts):
        if array is not None:
            size += int(array.nbytes)
    return size


def _has_arrays(output: Any) -> bool:
    return not (
        output.new_logprobs is None
        and output.new_prompt_logprobs_tensors is None
        and output.prompt_token_id_logprobs is None
        and output.routed_experts is None
    )


def _split(outputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the outputs in groups; one group if there are no arrays, because tokens alone are small."""
    group: list[Any] = []
    room = REPLY_BYTES
    for output in outputs if any(map(_has_arrays, outputs)) else ():
        size = size_of(output)
        if group and size > room:
            yield group
            group, room = [], REPLY_BYTES
        group.append(output)
        room -= size
    yield group or list(outputs)


def finish(output: Any, prepared: Prepared) -> bool:
    """Reduce an output to what its router needs. Return whether it is the request's last output."""
    output.kv_transfer_params = None
    output.ec_transfer_params = None
    # Any output may be the router's last one: this worker may die, or the router's front end may find a stop
    # string. Sending the metrics costs 0.6 us per output, for both sides together.
    output.spec_decode_metrics = prepared.request.spec_decode_metrics
    return output.finish_reason is not None


def drafts_of(prepared: Prepared | None) -> tuple[int, int]:
    """Return how many of a request's drafts were verified, and how many had their first token accepted."""
    metrics = prepared.request.spec_decode_metrics if prepared is not None else None
    if metrics is None:
        return 0, 0
    # histogram[j] counts steps in which j drafted tokens were accepted.
    return sum(metrics.histogram), sum(metrics.histogram[1:])


def failure(output: Any, prepared: Prepared, *, loads: bool) -> tuple[Failed.Code, str] | None:
    """Return the failure that an output stands for, if any. loads: the request's KV is still on its way."""
    if _has_arrays(output) and size_of(output) > REPLY_BYTES:
        return Failed.CODE_INVALID, (
            f"the log-probabilities of one step take {size_of(output) >> 20} MiB, and a message "
            f"has room for {REPLY_BYTES >> 20}: ask for fewer, or send a shorter prompt"
        )
    if not is_error(output):
        return None
    if lost := getattr(prepared.request, IMAGE_LOST, ""):
        return Failed.CODE_MEDIA, f"the image {lost} is needed again"
    if loads:
        return Failed.CODE_HANDOFF, "the KV cache could not be loaded"
    if problem := problem_of(prepared.request):
        return Failed.CODE_INVALID, problem
    return None


def is_error(output: Any) -> bool:
    """Return whether the engine gave up the request because its KV did not arrive or its grammar failed."""
    return bool(output.finish_reason == FinishReason.ERROR)


def end_of_prefill(
    output: Any,
    prepared: Prepared,
    saved: reports.Saved | None,
    max_model_len: int,
    *,
    tokens: Sequence[int],
    drafts: Sequence[int] = (),
) -> tuple[worker_pb2.Saved, worker_pb2.Complete | reports.Problem] | None:
    """Return the messages about a prefill's KV for its router and for the decode worker, or None.

    A prefill is cut after one token. If only the cut ended it, its last output is changed to that of a
    request that continues. If the token really ended the request (a stop, the client's max_tokens), the
    output gets the finish reason that an uncut run would have had, and the KV is not needed. tokens: the
    output tokens that follow the KV. drafts: the drafts that follow those tokens.
    """
    if output.finish_reason != FinishReason.LENGTH or not (prepared.saves or prepared.cut):
        return None
    if requests.really_ended(prepared, max_model_len):
        output.finish_reason, output.stop_reason = requests.finish_of(prepared.request)
        return None
    if prepared.cut:
        return None  # the number of tokens tells its router that the request continues
    output.finish_reason = None
    output.stop_reason = None
    output.spec_decode_metrics = None
    told = worker_pb2.Saved(request_id=prepared.request_id, epoch=prepared.epoch)
    if saved is None or saved.manifest is None:
        lacks = reports.Problem.of(SaveFailed("the engine kept no KV of this request"))
        problem = (saved.problem if saved is not None else None) or lacks
        told.problem = str(problem)
        return told, problem
    manifest = saved.manifest
    told.saved_at_s, told.save_ms, told.chunks = manifest.saved_at_s, manifest.save_ms, manifest.chunks
    return told, worker_pb2.Complete(manifest=manifest, token_ids=tokens, draft_token_ids=drafts)


def admitted(prepared: Prepared, loaded: reports.Loaded) -> worker_pb2.Admitted:
    return worker_pb2.Admitted(
        request_id=prepared.request_id,
        epoch=prepared.epoch,
        transport=loaded.transport,
        bytes=loaded.bytes,
        blocks_pulled=loaded.blocks,
        wait_ms=loaded.costs.wait_ms,
        move_ms=loaded.costs.move_ms,
        check_ms=loaded.costs.check_ms,
        load_ms=loaded.costs.load_ms,
        total_ms=loaded.total_ms,
        early_bytes=loaded.early_bytes,
        tokens=loaded.tokens,
    )
