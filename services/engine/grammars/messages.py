"""Exchange messages between a worker and the process that tries its grammars: pickles, each after its length.

Both ends are our own processes, and nobody else holds the socket.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

LENGTH = struct.Struct(">I")
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Limits:
    """The resources that one trial may use before it is ended."""

    cpu_s: float
    wall_s: float
    memory_bytes: int  # added to the helper's own
    nice: int


@dataclass(frozen=True)
class Open:
    """Prepare for this model. `context`: a pickled trial.Context."""

    context: bytes


@dataclass(frozen=True)
class Run:
    """Try a grammar. `params`: pickled SamplingParams."""

    number: int
    params: bytes
    limits: Limits


@dataclass(frozen=True)
class End:
    """End a trial whose outcome nobody waits for."""

    number: int


@dataclass(frozen=True)
class Verdict:
    """The outcome of a trial. With a `problem` the request is refused."""

    problem: str = ""
    structured_outputs: Any = None  # StructuredOutputsParams, as completed by vLLM's checks
    seconds: float = 0.0  # CPU time of the compilation


@dataclass(frozen=True)
class Done:
    """The end of a trial: its verdict, or the signal that ended it; "CPU" and "time" are our own limits."""

    number: int
    verdict: Verdict | None
    ended_by: str = ""


def encode(message: Any) -> bytes:
    """Encode a message, with its length first."""
    body = pickle.dumps(message)
    return LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> Any:
    """Wait for the next message. Raises EOFError at the end of the connection."""
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    return loads(_read(connection, length))


def loads(data: bytes | bytearray) -> Any:
    """Unpickle data from one of our own processes."""
    return pickle.loads(data)  # noqa: S301 (our own processes, over a socket that nobody else holds)


def _read(connection: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(length - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
