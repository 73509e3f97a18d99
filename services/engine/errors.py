"""Errors of a running engine.

ServiceError
└── EngineError
    ├── EngineFailed       the engine broke while it ran: the process ends
    │   └── RankLost       one of its processes has ended
    └── RequestRefused     a Start is not taken; carries the code of the protocol's Failed
"""

from __future__ import annotations

from baton.protos.worker_pb2 import Failed
from baton.services.errors import ServiceError


class EngineError(ServiceError):
    """The engine cannot do what a worker needs."""


class EngineFailed(EngineError):
    """The engine raised while it ran; its requests are lost, and the router starts them again elsewhere."""


class RankLost(EngineFailed):
    """A process of the engine has ended: killed, out of memory, or by its own fault."""


class RequestRefused(EngineError):
    """A request is refused. `code` tells the router what to do about it."""

    def __init__(self, code: Failed.Code, message: str) -> None:
        super().__init__(message)
        self.code = code
