"""Build messages and log fields about requests."""

from __future__ import annotations

from typing import Any

from baton.protos.worker_pb2 import Failed
from baton.services.engine import outputs
from baton.services.trace_context import trace_id_of
from baton.services.worker.attempts import RunningAttempt


def names_of(attempt: RunningAttempt) -> dict[str, str]:
    """Return a request's ids as extra fields of a log line."""
    return {"request_id": attempt.request_id, "trace_id": trace_id_of(attempt.traceparent)}


def failure_of(attempt: RunningAttempt, code: Failed.Code, message: str) -> Failed:
    return Failed(request_id=attempt.request_id, epoch=attempt.epoch, code=code, message=message)


def failure_in(output: Any, attempt: RunningAttempt) -> tuple[Failed.Code, str] | None:
    """Return the failure (code, text) that an engine output stands for; None if it is a normal output."""
    if outputs.is_too_large(output):
        return Failed.CODE_INVALID, (
            f"the log-probabilities of one step take {outputs.size_of(output) >> 20} MiB, and a message "
            f"has room for {outputs.REPLY_BYTES >> 20}: ask for fewer, or send a shorter prompt"
        )
    if attempt.incoming is not None and attempt.incoming.loads and outputs.is_error(output):
        return Failed.CODE_HANDOFF, "the KV cache could not be loaded"
    if problem := outputs.grammar_problem(output, attempt.prepared):
        return Failed.CODE_INVALID, problem
    return None
