"""Errors of offline use."""

from baton.services.errors import ServiceError


class OfflineError(ServiceError):
    """Prompts or requests cannot be run."""


class InputError(OfflineError):
    """A batch file is invalid: nothing was started. The text names its lines."""


class RequestError(OfflineError):
    """One request failed; the others continue. `status` is the HTTP status, 0 without a response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(OfflineError):
    """No request has had a response for minutes: retrying is pointless."""


class DeploymentEnded(OfflineError):
    """The deployment has ended or was closed; the text says why."""
