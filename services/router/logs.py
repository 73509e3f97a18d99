"""One configured logger for the router's process: text for people, or a JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Literal

_FOREIGN = ("vllm", "torch", "transformers", "grpc", "uvicorn", "asyncio")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(log_format: Literal["text", "json"], level: str) -> None:
    """Send all logs of this process to stderr in one form; ours from INFO on, others' from `level` on."""
    text = logging.Formatter("%(asctime)s %(levelname)s [router] %(name)s: %(message)s")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else text)
    logging.getLogger().handlers[:] = [handler]
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # vLLM would put a handler of its own on its logger
    # At its default the router shows vLLM's errors alone: it warns of a device that is not used here.
    levels = dict.fromkeys(_FOREIGN, level.upper())
    levels["vllm"] = "ERROR" if level == "warning" else level.upper()
    for name in _FOREIGN:
        foreign = logging.getLogger(name)
        foreign.handlers.clear()
        foreign.propagate = True
        foreign.setLevel(levels[name])
    logging.getLogger("baton").setLevel(min(logging.INFO, logging.getLevelName(level.upper())))
