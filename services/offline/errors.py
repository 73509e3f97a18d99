"""Errors of offline use.

ServiceError
└── OfflineError
    ├── InputError         a batch file is invalid: nothing was started
    ├── RequestError       one request failed; the others go on. Has the HTTP status, if any
    ├── Unavailable        no request has got a response for minutes: retrying is pointless
    └── DeploymentEnded    the deployment is gone: nothing could serve any more, or it was closed
"""

from baton.services.errors import ServiceError


class OfflineError(ServiceError):
    """Prompts or requests cannot be run."""


class InputError(OfflineError):
    """A batch file is invalid; the text names its lines."""


class RequestError(OfflineError):
    """One request failed. `status` is the HTTP status, 0 without a response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(OfflineError):
    """The deployment does not respond to requests."""


class DeploymentEnded(OfflineError):
    """The processes of the deployment have ended; the text says why."""
