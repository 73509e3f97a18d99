"""Errors of tenants.

ServiceError
├── BookError    the key book cannot be read or changed
└── OverLimit    a request is over a limit of its key or tenant
"""

from __future__ import annotations

from baton.services.errors import ServiceError


class BookError(ServiceError):
    """The key book cannot be read or changed. The message says where the book is."""


class OverLimit(ServiceError):
    """A request is over a limit. `retry_after_s` is 0 if a retry would not help."""

    def __init__(self, message: str, limit: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.limit = limit  # the limit's name in the book
        self.retry_after_s = retry_after_s
