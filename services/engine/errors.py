"""Errors of a running engine.

ServiceError
├── EngineFailed       the engine broke while it ran, and the process ends
│   ├── RankLost       one of the engine's processes has ended
│   └── SiblingLost    another worker of its gang has ended
└── RequestRefused     a Start is refused, with a code of the protocol's Failed
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.protos.worker_pb2 import Failed
from baton.services.errors import ServiceError


class EngineFailed(ServiceError):
    """The engine failed while it ran. Its requests are lost, and the router restarts them elsewhere."""


class RankLost(EngineFailed):
    """A process of the engine has ended: killed, out of memory, or crashed."""


class SiblingLost(EngineFailed):
    """Another worker of the gang has ended, so this engine cannot compute."""


class RequestRefused(ServiceError):
    """A request is refused. `code` tells the router what to do with it."""

    def __init__(self, code: Failed.Code, message: str, images: Sequence[str] = ()) -> None:
        """`images`: names of the missing images if the code is MEDIA; empty: any may be missing."""
        super().__init__(message)
        self.code = code
        self.images = images
