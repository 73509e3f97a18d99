"""Attempts at requests, and their ids."""

from __future__ import annotations

from dataclasses import dataclass

MAX_EPOCH = 2**31  # far above any real epoch
EPOCH_KEEP_S = 60  # how long a request's last epoch is remembered; no call takes longer
PREFIX_WAIT_S = 1.0  # time limit to save a prompt's prefix; after that the whole prompt is computed


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a request. An attempt with a higher epoch supersedes it."""

    request_id: str
    epoch: int

    def __post_init__(self) -> None:
        if not self.request_id:
            raise ValueError("request_id is empty")
        if not 1 <= self.epoch < MAX_EPOCH:
            raise ValueError(f"epoch of request {self.request_id!r} is {self.epoch}: it counts from 1")


def attempt_id(request_id: str, epoch: int) -> str:
    """Return an attempt's id in engines, where two attempts at a request must not be confused."""
    return f"{request_id}#{epoch}"


def prefix_id(request_id: str) -> str:
    """Return the id under which a worker saves a prompt's prefix for another worker.

    It differs from the request's id, because the same worker may also decode the request.
    """
    return f"{request_id}/prefix"


def image_id(request_id: str, number: int) -> str:
    """Return the id under which an encode worker computes one of a request's images."""
    return f"{request_id}/i{number}"


def is_image(request_id: str) -> bool:
    """Return whether this is the id of a request's image."""
    _, mark, number = request_id.rpartition("/i")
    return bool(mark) and number.isdecimal()
