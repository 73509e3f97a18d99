"""The errors inside a worker.

ServiceError
└── WorkerError
    ├── EngineFailed       the engine broke while it ran: the process ends
    └── RequestRefused     a Start is not taken; carries the code of the protocol's Failed
"""

from __future__ import annotations

from baton.errors import BatonError
from baton.protos.worker_pb2 import Failed
from baton.services.errors import ServiceError, one_line


class WorkerError(ServiceError):
    """A worker cannot do its work."""


class EngineFailed(WorkerError):
    """The engine raised while it ran; its requests are lost here, and routers start them again elsewhere."""


def describe(error: BaseException) -> str:
    """Return one line of at most 600 characters; with the class where it is not one of ours."""
    text = one_line(error)[:600]
    if isinstance(error, BatonError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class RequestRefused(WorkerError):
    """A request is not taken. `code` tells the router what to do about it."""

    def __init__(self, code: Failed.Code, message: str) -> None:
        super().__init__(message)
        self.code = code
