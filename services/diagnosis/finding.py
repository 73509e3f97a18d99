"""Findings of `baton doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it works, but not as well as it could, or not for long
    WRONG = "wrong"  # something cannot work


@dataclass(frozen=True)
class Finding:
    """One line: the subject, what was found, and what to do about it."""

    area: str  # such as "shared memory"
    subject: str  # such as "this machine", or a worker's id
    verdict: Verdict
    what: str
    todo: str = ""

    def as_json(self) -> dict[str, str]:
        return {key: str(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class About:
    area: str
    subject: str

    def ok(self, what: str) -> Finding:
        return Finding(self.area, self.subject, Verdict.OK, what)

    def warning(self, what: str, todo: str) -> Finding:
        return Finding(self.area, self.subject, Verdict.WARNING, what, todo)

    def wrong(self, what: str, todo: str) -> Finding:
        return Finding(self.area, self.subject, Verdict.WRONG, what, todo)


def size(count: float) -> str:
    """Return a number of bytes as text: `512 MiB`, `7.8 GiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
