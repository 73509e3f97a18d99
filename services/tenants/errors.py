"""Errors of tenants.

ServiceError
├── BookError    the book of keys cannot be read or changed
└── OverLimit    a request is beyond a limit of its key or tenant
"""

from __future__ import annotations

from baton.services.errors import ServiceError


class BookError(ServiceError):
    """The book of keys cannot be read or changed. The text names its place."""


class OverLimit(ServiceError):
    """A request is beyond a limit. `retry_after_s` is 0 if no wait would help."""

    def __init__(self, message: str, limit: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.limit = limit  # the limit's name in the book
        self.retry_after_s = retry_after_s
