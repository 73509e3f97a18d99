"""Attempts at requests, and their names in routers, schedulers, workers and engines."""

from __future__ import annotations

from dataclasses import dataclass

MAX_EPOCH = 2**31  # far above any real epoch
EPOCH_KEEP_S = 60  # s for which a request's last epoch is remembered: deadlines stop later calls
BEGINNING_S = 1.0  # s for a source to save a prompt's beginning; after that the whole prompt is computed


@dataclass(frozen=True, slots=True)
class Attempt:
    """Identify one attempt at one request. A later one has a higher epoch and supersedes this one."""

    request_id: str
    epoch: int

    def __post_init__(self) -> None:
        if not self.request_id:
            raise ValueError("request_id is empty")
        if not 1 <= self.epoch < MAX_EPOCH:
            raise ValueError(f"epoch of request {self.request_id!r} is {self.epoch}: it counts from 1")


def attempt_id(request_id: str, epoch: int) -> str:
    """Return an attempt's name in engines and their outputs, so that two attempts at a request never meet."""
    return f"{request_id}#{epoch}"


def prefix_id(request_id: str) -> str:
    """Return the name under which a worker saves the beginning of a request's prompt.

    To that worker it is a request of its own, because it may also be the one that decodes the request.
    """
    return f"{request_id}/prefix"
