"""Set up a process's logging, as text or as one JSON object per line.

docs/observability.md, "Logs", says what is logged where.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from types import MappingProxyType
from typing import Literal

from baton.services import printing
from baton.services.errors import ConfigError

LOGGER = "baton"
_FORM = "_BATON_LOG"  # FORMAT:PROCESS, inherited by every child process
LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
_FOREIGN = ("vllm", "torch", "transformers", "huggingface_hub", "grpc", "uvicorn", "asyncio", "py.warnings")
_SAYS_TWICE = "vllm.transformers_utils.repo_utils"  # logs an unreadable model, then raises the same error
# Fields added to the log lines of this task and of tasks that it starts later.
_concerns: ContextVar[MappingProxyType[str, str]] = ContextVar("concerns", default=MappingProxyType({}))
_MADE_HERE = frozenset({"message", "asctime", "fields"})


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s [{process}] %(name)s: %(message)s%(fields)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        record.fields = "".join(f" {key}={value}" for key, value in fields.items())
        return super().format(record)


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Stderr(logging.Handler):
    """Prints records on stderr without blocking on a stalled reader or a full disk."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stderr  # may be a test's stream, or predate a redirection

    def emit(self, record: logging.LogRecord) -> None:
        try:
            printing.put(self._stream, self.format(record) + "\n")
        except Exception:  # noqa: BLE001 (arguments that do not fit the text)
            self.handleError(record)


def concern(**fields: str) -> None:
    """Add fields such as request_id to all later log lines of this task and its children."""
    _concerns.set(MappingProxyType({**_concerns.get(), **fields}))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields passed as `extra` and those of the current task."""
    # Libraries (vLLM) replace the record factory, so the usual fields can change.
    usual = vars(logging.makeLogRecord({})).keys() | _MADE_HERE
    own = {key: value for key, value in vars(record).items() if key not in usual}
    return {**own, **{key: value for key, value in _concerns.get().items() if key not in own}}


def configure(
    log_format: Literal["text", "json"], process: str, *, libraries: str = "ERROR"
) -> logging.Logger:
    """Send all logs of this process to stderr in one format. Call once, before vLLM is imported.

    Baton logs from INFO on. Libraries' logs and Python's warnings are shown from level `libraries` on, or
    from VLLM_LOGGING_LEVEL if set. Raises ConfigError if that is not a level.
    """
    level = _level(os.environ.get(LEVEL_VARIABLE) or libraries)
    handler = _Stderr()
    handler.setFormatter(formatter(log_format, process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # or vLLM adds its own handler on import
    for name in _FOREIGN:
        foreign = logging.getLogger(name)
        foreign.handlers.clear()
        foreign.propagate = True
        foreign.setLevel(level)
    logging.getLogger(_SAYS_TWICE).setLevel(logging.CRITICAL)
    # These libraries set up their own loggers on import; torch's C++ side has none.
    shown = "error" if level > logging.WARNING else "warning"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", shown)
    os.environ.setdefault("HF_HUB_VERBOSITY", shown)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", shown.upper())
    logging.captureWarnings(True)  # Python's own warnings would break a log of JSON lines
    os.environ[_FORM] = f"{log_format}:{process}"
    own = logging.getLogger(LOGGER)
    own.setLevel(logging.INFO)
    return own


def formatter(log_format: Literal["text", "json"], process: str) -> logging.Formatter:
    return _Json(process) if log_format == "json" else _Text(process)


def follow() -> None:
    """Log in the parent's format, in a process that vLLM spawned (a tensor-parallel rank)."""
    log_format, _, process = os.environ.get(_FORM, "").partition(":")
    if process and not logging.getLogger().handlers:
        configure("json" if log_format == "json" else "text", process)


def keep_warnings() -> None:
    """Show libraries' warnings in a process with its own log file. Call it before `configure`."""
    os.environ.setdefault(LEVEL_VARIABLE, "WARNING")


def _level(name: str) -> int:
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise ConfigError(
            f"environment variable {LEVEL_VARIABLE}: value {name!r} is not allowed: "
            "use ERROR, WARNING, INFO or DEBUG"
        )
    return level
