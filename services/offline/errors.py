"""What goes wrong offline.

ServiceError
└── OfflineError
    ├── InputError         a batch file is not what it should be: nothing was started
    ├── RequestError       one request got no answer; the others go on. Has the HTTP status, if any
    ├── Unavailable        nobody has answered anything for minutes: going on makes no sense
    └── DeploymentEnded    the deployment is gone: nothing could serve any more, or it was closed
"""

from baton.services.errors import ServiceError


class OfflineError(ServiceError):
    """Prompts or requests cannot be answered."""


class InputError(OfflineError):
    """A batch file is wrong; the text names its lines."""


class RequestError(OfflineError):
    """One request failed. `status` is the HTTP status, 0 where no answer came at all."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(OfflineError):
    """The deployment does not take or answer requests."""


class DeploymentEnded(OfflineError):
    """The deployment's processes have ended; says why."""
