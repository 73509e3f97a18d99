"""The errors that end a request early, with their HTTP status."""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus

from baton.services.errors import ServiceError

MAX_TEXT = 4_000  # characters of an error, which may quote the request


def shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


class RequestFailed(ServiceError):
    """An error that ends a request. `retry_after_s`: 0 sends no Retry-After, except in a 503."""

    status = HTTPStatus.SERVICE_UNAVAILABLE  # the default
    # `type` and `code` of OpenAI's error object; if empty, they follow from the status.
    kind = ""
    code = ""
    param: str | None = None
    final = False  # tells OpenAI's and Anthropic's client libraries not to retry

    def __init__(self, message: str, retry_after_s: float = 0.0, *, status: HTTPStatus | None = None) -> None:
        message = shortened(message)
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.status = status or self.status


class Why(StrEnum):
    """The reason why a request is not placed; label `code` of the rejections metric."""

    FULL = "FULL"  # all workers are busy
    NO_WORKERS = "NO_WORKERS"
    TOO_LARGE = "TOO_LARGE"  # too large for every worker, or for the journal
    STALE_EPOCH = "STALE_EPOCH"
    REFUSED = "REFUSED"  # the scheduler finds it malformed
    UNAVAILABLE = "UNAVAILABLE"  # no scheduler answers
    JOURNAL = "JOURNAL"  # the journal is full
    QUEUE = "QUEUE"  # the queue is full, or too slow


class NotAdmitted(RequestFailed):
    """The request was not placed: 503, or 400 if no worker could ever take it (`never`)."""

    def __init__(self, message: str, why: Why, retry_after_s: float = 0.0) -> None:
        self.why = why
        self.never = why in (Why.TOO_LARGE, Why.REFUSED)  # the request would always be refused
        super().__init__(message, retry_after_s, status=HTTPStatus.BAD_REQUEST if self.never else None)

    @property
    def waiting_helps(self) -> bool:
        """Whether a retry may soon succeed: the workers are full, or the scheduler is unreachable."""
        return self.why in (Why.FULL, Why.UNAVAILABLE)


class EngineBroken(RequestFailed):
    """An engine failed while it ran this request alone, and would fail again."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    kind, code = "server_error", "engine_failed"
    final = True


class Convicted(RequestFailed):
    """The same request was answered with EngineBroken a short while ago.

    The status is not a 5xx because many clients retry after a 5xx.
    """

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    kind, code = "invalid_request_error", "engine_failed"
    final = True


class Overloaded(RequestFailed):
    """The router itself has no room for the request right now."""


class TooLarge(RequestFailed):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class UnreadableBody(RequestFailed):
    """The request's body is compressed, or not JSON."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE

    def __init__(self, message: str, accepted: bytes) -> None:
        """Refuse the body; `accepted` is the response header that lists what the router accepts."""
        super().__init__(message)
        self.accepted = accepted


class Unauthorized(RequestFailed):
    status = HTTPStatus.UNAUTHORIZED


class RateLimited(RequestFailed):
    """The request exceeds a limit of its key or tenant. `limit` is the limit's name in the key book."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    kind, code = "rate_limit_error", "rate_limit_exceeded"  # OpenAI's clients test for these

    def __init__(self, message: str, limit: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.limit = limit


class NotAllowed(RequestFailed):
    """The request asks for a class that its key may not use."""

    status = HTTPStatus.FORBIDDEN


class NoSuchModel(RequestFailed):
    status = HTTPStatus.NOT_FOUND
    kind, code, param = "invalid_request_error", "model_not_found", "model"


class NoSuchResponse(RequestFailed):
    """The request names a stored response that its tenant does not have."""

    status = HTTPStatus.NOT_FOUND
    kind, param = "invalid_request_error", "response_id"


class Unsupported(RequestFailed):
    """The request asks for a feature that the router or the engines do not support."""

    status = HTTPStatus.BAD_REQUEST


class WorkerUnreachable(ServiceError):
    """A worker cannot be reached, or refuses to talk to this router."""
