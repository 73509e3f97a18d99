"""The messages between a worker and its helper process, over a socket that no other process has.

A message is a length and a pickle, the format of the multiprocessing Connection at the helper's end.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any

LENGTH = struct.Struct("!i")


@dataclass(frozen=True)
class Limits:
    """The resources that a trial may use before its process is killed."""

    cpu_s: float
    wall_s: float
    memory_bytes: int  # in addition to what the helper has
    nice: int


@dataclass(frozen=True)
class Open:
    """Prepare for a model. `context`: a pickled trial.Context."""

    context: bytes


@dataclass(frozen=True)
class Run:
    """Try a grammar. `params`: pickled SamplingParams."""

    number: int
    params: bytes
    limits: Limits


@dataclass(frozen=True)
class End:
    """End a trial that has no callers left."""

    number: int


@dataclass(frozen=True)
class Verdict:
    """The result of a trial. With a `problem` the request is refused."""

    problem: str = ""
    structured_outputs: Any = None  # StructuredOutputsParams, completed by vLLM's checks
    seconds: float = 0.0  # CPU time of the compilation


@dataclass(frozen=True)
class Done:
    """A trial ended, with its verdict or by a signal; `ended_by` "CPU" or "time" means our own limits."""

    number: int
    verdict: Verdict | None
    ended_by: str = ""


def encode(message: Any) -> bytes:
    body = pickle.dumps(message)
    return LENGTH.pack(len(body)) + body


def loads(data: bytes | bytearray) -> Any:
    return pickle.loads(data)  # noqa: S301 (from our own process)
