"""A case of `python -m bench kernels`: an operation on inputs of one shape, and its alternatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """A shape of an operation, as functions that are bound to inputs of it.

    `run` and each of `against` may be called any number of times, do the same work each time, never wait on
    the host, and leave their inputs unchanged.
    """

    name: str  # unique among the operation's cases
    shape: dict[str, int | str]
    bytes_moved: int  # that any implementation has to read and write at least
    run: Callable[[], object]
    against: Mapping[str, Callable[[], object]] = field(default_factory=dict)
