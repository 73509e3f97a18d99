"""One configured logger a process: text for people, or a JSON object a line for machines.

Which lines are shown, and where: docs/observability.md, "Logs".
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Literal

from baton.services.errors import ConfigError

LOGGER = "baton"
_FORM = "_BATON_LOG"  # inherited by every process that this one starts: FORMAT:WHO
LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
_FOREIGN = ("vllm", "torch", "transformers", "huggingface_hub", "grpc", "uvicorn", "asyncio", "py.warnings")
_SAYS_TWICE = "vllm.transformers_utils.repo_utils"  # what it logs, of a model that cannot be read, it raises
_MADE_HERE = frozenset({"message", "asctime", "fields"})


class _Text(logging.Formatter):
    def __init__(self, who: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s [{who}] %(name)s: %(message)s%(fields)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        record.fields = "".join(f" {key}={value}" for key, value in fields.items())
        return super().format(record)


class _Json(logging.Formatter):
    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "process": self._who,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What a call gave as `extra`."""
    # What every record has is no news: libraries put a factory of theirs in the standard one's place (vLLM).
    usual = vars(logging.makeLogRecord({})).keys() | _MADE_HERE
    return {key: value for key, value in vars(record).items() if key not in usual}


def configure(log_format: Literal["text", "json"], who: str, *, libraries: str = "ERROR") -> logging.Logger:
    """Send all logs of this process to stderr in one form. Called once, before vLLM is imported.

    Ours are shown from INFO on. Those of libraries, vLLM's and Python's warnings among them, are shown from
    `libraries` on, or from what VLLM_LOGGING_LEVEL says. Raises ConfigError when that is no level.
    """
    level = _level(os.environ.get(LEVEL_VARIABLE) or libraries)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(who) if log_format == "json" else _Text(who))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    # vLLM puts a handler of its own on its logger when it is imported: ours alone must speak.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    for name in _FOREIGN:
        foreign = logging.getLogger(name)
        foreign.handlers.clear()
        foreign.propagate = True
        foreign.setLevel(level)
    logging.getLogger(_SAYS_TWICE).setLevel(logging.CRITICAL)
    # These set their own loggers up when they are imported; torch's C++ side has none.
    shown = "error" if level > logging.WARNING else "warning"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", shown)
    os.environ.setdefault("HF_HUB_VERBOSITY", shown)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", shown.upper())
    logging.captureWarnings(True)  # Python's own, which would break a log of JSON lines
    os.environ[_FORM] = f"{log_format}:{who}"
    own = logging.getLogger(LOGGER)
    own.setLevel(logging.INFO)
    return own


def follow() -> None:
    """In a process that vLLM started anew (a tensor-parallel rank): log as the one that asked for it."""
    log_format, _, who = os.environ.get(_FORM, "").partition(":")
    if who and not logging.getLogger().handlers:
        configure("json" if log_format == "json" else "text", who)


def keep_warnings() -> None:
    """In a process that has a log file to itself, before `configure`: libraries' warnings are kept there."""
    os.environ.setdefault(LEVEL_VARIABLE, "WARNING")


def _level(name: str) -> int:
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise ConfigError(
            f"environment variable {LEVEL_VARIABLE}: value {name!r} is not allowed: "
            "say ERROR, WARNING, INFO or DEBUG"
        )
    return level
