"""Log one line for each finished sequence, and for each request refused before it had one."""

from __future__ import annotations

import logging
from urllib.parse import quote

from baton.services.router.record import Record
from baton.services.router.state import RequestState
from baton.services.router.usage import usage_of

log = logging.getLogger("baton.requests")  # its level is router.log_level


def log_request(state: RequestState, record: Record) -> None:
    """Log a finished sequence, its cost, and its time to first token by stage."""
    if not log.isEnabledFor(logging.INFO):
        return
    fields = {
        "request_id": record.request_id,
        "trace_id": record.trace.trace_id,
        "tenant": record.tenant or None,
        "class": record.service,
        "status": record.status or None,
        "outcome": record.outcome,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "duration_ms": _ms(record.ended - record.arrived),
        "ttft_ms": _ms(record.first_token_s) if record.first_token_s else None,
        "client_ms": _ms(record.client_s),
        **usage_of([state]),
        "stages_ms": {name: _ms(seconds) for name, seconds in record.first_token_stages.items()},
    }
    log.info("request", extra=fields)


def log_without_sequence(status: int, path: str, tenant: str = "", error: str = "") -> None:
    """Log a request that began no sequence: refused for its key or limits, or malformed."""
    # Quoted: a line break in a path must not start another log line.
    fields = {"status": status, "tenant": tenant or None, "path": quote(path), "error": error or None}
    log.info("request", extra=fields)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
