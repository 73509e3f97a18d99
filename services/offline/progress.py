"""The progress display: a bar on a terminal, or a line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from baton.services.printing import Unfailing, complain

EVERY_S = 10.0  # between two lines


class Progress:
    """A count of finished requests, shown with tokens/s, errors and the time left unless `quiet`."""

    def __init__(self, total: int, *, done: int = 0, quiet: bool = False) -> None:
        self.total = total
        self.done = done
        self.failed = 0
        self.tokens = 0
        self._before = done
        self._began = self._spoke = time.monotonic()
        self._lines = not quiet and not sys.stderr.isatty()
        self._bar: RichProgress | None = None
        if not quiet and not self._lines:
            self._bar = RichProgress(
                TextColumn("  "),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(file=cast(TextIO, Unfailing(sys.stderr))),
                transient=True,
            )
            self._task = self._bar.add_task("", total=total, completed=done, rate="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def count(self, tokens: int, *, failed: bool) -> None:
        self.done += 1
        self.failed += failed
        self.tokens += tokens
        if self._bar:
            self._bar.update(self._task, completed=self.done, rate=self.rate)
        elif self._lines and time.monotonic() - self._spoke > EVERY_S:
            self._spoke = time.monotonic()
            complain(f"  {self.done} of {self.total}, {self.rate}, {self._left}")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def rate(self) -> str:
        """Throughput and errors so far, such as `312 tokens/s, 2 errors`."""
        errors = f", {self.failed} error{'s' * (self.failed != 1)}" if self.failed else ""
        return f"{self.tokens / max(self.elapsed_s, 1e-3):.0f} tokens/s{errors}"

    @property
    def _left(self) -> str:
        done = self.done - self._before
        return f"{self.elapsed_s / done * (self.total - self.done):.0f} s left" if done else "? s left"
