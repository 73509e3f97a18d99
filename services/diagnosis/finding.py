"""Findings of `baton doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The gravity of a finding."""

    OK = "ok"
    WARNING = "warning"  # it works, but not as well as it could, or not for long
    WRONG = "wrong"  # something cannot work


@dataclass(frozen=True)
class Finding:
    """One line: the subject, what was found, and what to do unless it is well."""

    area: str  # as "shared memory"
    subject: str  # as "this machine", or a worker's id
    verdict: Verdict
    what: str
    todo: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the fields."""
        return {key: str(value) for key, value in asdict(self).items()}


def ok(area: str, subject: str, what: str) -> Finding:
    """Say that something is well."""
    return Finding(area, subject, Verdict.OK, what)


def warning(area: str, subject: str, what: str, todo: str) -> Finding:
    """Say that something could be better."""
    return Finding(area, subject, Verdict.WARNING, what, todo)


def wrong(area: str, subject: str, what: str, todo: str) -> Finding:
    """Say that something cannot work."""
    return Finding(area, subject, Verdict.WRONG, what, todo)


def size(count: float) -> str:
    """Return bytes for people: `512 MiB`, `7.8 GiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
