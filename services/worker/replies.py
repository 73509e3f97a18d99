"""The messages with which a worker reports on requests to their routers."""

from __future__ import annotations

from baton.protos.worker_pb2 import Failed, RunReply
from baton.services.trace_context import trace_id_of
from baton.services.worker.attempts import RunningAttempt


def reply_to(replies: dict[int, RunReply], session: int) -> RunReply:
    """Return a step's reply to a router's stream; create it if needed."""
    return replies.setdefault(session, RunReply())


def names_of(attempt: RunningAttempt) -> dict[str, str]:
    """Return the ids of a request for a log line."""
    return {"request_id": attempt.request_id, "trace_id": trace_id_of(attempt.traceparent)}


def failure_of(attempt: RunningAttempt, code: Failed.Code, message: str) -> Failed:
    """Return the message that an attempt has failed."""
    return Failed(
        request_id=attempt.request_id, epoch=attempt.epoch, code=code, message=message, phase=attempt.phase
    )
