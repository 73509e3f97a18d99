"""What `python -m bench kernels` times: an operation on inputs of one shape, and what to hold it against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """A shape of an operation, its inputs made and bound into what is called.

    `run` and each of `against` may be called any number of times, does the same work each time, waits for
    nothing on the host, and leaves its inputs as they were.
    """

    name: str  # what tells it from the operation's other cases
    shape: dict[str, int | str]
    bytes_moved: int  # that any implementation has to read and write at least
    run: Callable[[], object]
    against: Mapping[str, Callable[[], object]] = field(default_factory=dict)
