"""One configured logger for a worker's process: text for people or a JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Literal

LOGGER = "baton"
_FOREIGN = ("vllm", "torch", "transformers", "grpc")  # said at WARNING and above
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _Text(logging.Formatter):
    def __init__(self, worker_id: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s [{worker_id}] %(name)s: %(message)s%(fields)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        record.fields = "".join(f" {key}={value}" for key, value in fields.items())
        return super().format(record)


class _Json(logging.Formatter):
    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self._worker_id = worker_id

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "worker": self._worker_id,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What a call gave as `extra`."""
    return {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS and key != "fields"}


def configure(log_format: Literal["text", "json"], worker_id: str) -> logging.Logger:
    """Send all logs of this process to stderr in one form. Called once, before vLLM is imported if it can be.

    vLLM's own logs are kept from WARNING on, unless VLLM_LOGGING_LEVEL says otherwise.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(worker_id) if log_format == "json" else _Text(worker_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # vLLM puts a handler of its own on its logger when it is imported: ours alone must speak.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    for name in _FOREIGN:
        foreign = logging.getLogger(name)
        foreign.handlers.clear()
        foreign.propagate = True
        foreign.setLevel(os.environ["VLLM_LOGGING_LEVEL"] if name == "vllm" else logging.WARNING)
    logging.captureWarnings(True)  # Python's own, which would break a log of JSON lines
    own = logging.getLogger(LOGGER)
    own.setLevel(logging.INFO)
    return own
