"""The figures of a run as a file, and as the table of docs/reliability.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench import stats
from tests.chaos.outcome import Outcome
from tests.support import ROOT

RESULTS = stats.RESULTS / "chaos.json"


def save(file: Path, outcomes: Sequence[Outcome]) -> None:
    pass


def write(file: Path) -> Path:
    return ROOT
