"""Attempts at requests, and the names that routers, schedulers, workers and engines give them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_EPOCH = 2**31  # nobody gets near it
EPOCH_KEEP_S = 60  # s; a request's last epoch is known so long: a deadline stops calls that come later
BEGINNING_S = 1.0  # a source has so long to save a prompt's beginning; then all of the prompt is computed


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at one request. A later try has a higher epoch and makes the earlier one void."""

    request_id: str
    epoch: int

    def __post_init__(self) -> None:
        if not self.request_id:
            raise ValueError("request_id is empty")
        if not 1 <= self.epoch < MAX_EPOCH:
            raise ValueError(f"epoch of request {self.request_id!r} is {self.epoch}: it counts from 1")


def attempt_id(request_id: str, epoch: int) -> str:
    """Return an attempt's name in the engines and in their outputs: two attempts at a request never meet."""
    return f"{request_id}#{epoch}"


def prefix_id(request_id: str) -> str:
    """Return the name under which the beginning of a request's prompt is saved by a worker that holds it.

    To that worker it is a request of its own: it may be the one that decodes the request, too.
    """
    return f"{request_id}/prefix"
