"""The learning rate: a short warm-up, a constant part, and a linear way down to zero at the end.

This is the warm-up, stable, decay shape of MiniCPM (Hu et al., 2024): the constant part can be of any length,
so that training can be wound down whenever the time is up.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run that ends after `steps` steps or at `finish_at` (Unix seconds), whichever comes first.

    `began_at` (Unix seconds) is kept across restarts. `decay_share` is the last part of the run in which the
    rate falls.
    """

    began_at: float
    finish_at: float
    steps: int
    warmup_steps: int = 100
    decay_share: float = 0.35

    def remaining(self, step: int, now: float) -> float:
        """Return the part of the run that is left, 0 to 1."""
        by_time = (self.finish_at - now) / max(self.finish_at - self.began_at, 1.0)
        by_steps = 1.0 - step / self.steps
        return max(0.0, min(by_time, by_steps, 1.0))

    def scale(self, step: int, now: float) -> float:
        """Return the factor of the peak learning rate, 0 to 1."""
        return min((step + 1) / self.warmup_steps, self.remaining(step, now) / self.decay_share, 1.0)


def next_time_of_day(text: str, now: float) -> float:
    """Return the Unix seconds of the next `HH:MM` in UTC.

    Raises ValueError when `text` is not of that form.
    """
    today = dt.datetime.fromtimestamp(now, tz=dt.UTC)
    moment = dt.datetime.strptime(text, "%H:%M").replace(
        year=today.year, month=today.month, day=today.day, tzinfo=dt.UTC
    )
    if moment.timestamp() <= now:
        moment += dt.timedelta(days=1)
    return moment.timestamp()
