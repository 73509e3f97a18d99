"""Why a request gets no answer, or no whole one.

ServiceError
├── RequestFailed         has the HTTP status, and when to come back
│   ├── NotAdmitted       no placement: no room in time, no workers, no scheduler, or it can never fit
│   ├── AttemptsExhausted every attempt that it may have failed
│   ├── TimedOut          it took longer than router.request_timeout_s, or than its client said
│   ├── Overloaded        too many connections, or bytes of requests, at once
│   ├── TooLarge          its body is
│   ├── HeadersTooLarge   its headers are
│   ├── TooSlow           its sender is
│   ├── Unauthorized      it has no API key, or a wrong one
│   └── Unsupported       it asks for what workers behind a router cannot do, or their engines refuse
└── WorkerUnreachable     a worker does not answer (the request goes on elsewhere)
"""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus

from baton.services.errors import ServiceError


class RequestFailed(ServiceError):
    """One request ends with an error. `retry_after_s` is 0 where coming back would not help."""

    status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class Why(StrEnum):
    """Why a request is not placed; the `code` of the router's metric."""

    FULL = "FULL"  # everybody is there, and busy
    NO_WORKERS = "NO_WORKERS"
    TOO_LARGE = "TOO_LARGE"  # for every worker, or for the journal
    STALE_EPOCH = "STALE_EPOCH"
    REFUSED = "REFUSED"  # by the scheduler, as malformed
    UNAVAILABLE = "UNAVAILABLE"  # the scheduler is
    JOURNAL = "JOURNAL"  # it is full
    QUEUE = "QUEUE"  # it is full, or too slow


class NotAdmitted(RequestFailed):
    """No worker was found for the request. 503, or 400 where no worker could ever take it (`never`)."""

    def __init__(self, message: str, why: Why, retry_after_s: float = 0.0) -> None:
        super().__init__(message, retry_after_s)
        self.why = why
        if self.never:
            self.status = HTTPStatus.BAD_REQUEST

    @property
    def never(self) -> bool:
        return self.why in (Why.TOO_LARGE, Why.REFUSED)

    @property
    def waiting_helps(self) -> bool:
        """A moment's patience may be enough, as nobody is missing but the scheduler."""
        return self.why in (Why.FULL, Why.UNAVAILABLE)


class AttemptsExhausted(RequestFailed):
    """Workers failed under the request, and no other attempt is possible."""


class TimedOut(RequestFailed):
    """The request took too long."""

    status = HTTPStatus.GATEWAY_TIMEOUT


class Overloaded(RequestFailed):
    """The router itself has no room for it now."""


class TooLarge(RequestFailed):
    """Its body is larger than may be."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class HeadersTooLarge(RequestFailed):
    """Its headers are larger than may be."""

    status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


class TooSlow(RequestFailed):
    """It did not arrive in its time."""

    status = HTTPStatus.REQUEST_TIMEOUT


class Unauthorized(RequestFailed):
    """It has no API key, or a wrong one."""

    status = HTTPStatus.UNAUTHORIZED


class Unsupported(RequestFailed):
    """The request asks for something that the router does not offer, or no engine takes."""

    status = HTTPStatus.BAD_REQUEST


class WorkerUnreachable(ServiceError):
    """A worker cannot be reached, or refuses to talk to this router."""
