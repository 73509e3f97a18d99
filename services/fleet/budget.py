"""Count how often a part ends, and decide when it restarts."""

from __future__ import annotations

from dataclasses import dataclass, field

BACKOFF_S = 1.0


@dataclass(frozen=True)
class Patience:
    """Limits of restarts: how many within a window, and the pause before each."""

    restarts: int = 3  # within `window_s`; a part that dies more often is given up
    window_s: float = 600.0  # older deaths do not count
    # Pause before the second restart; the first is immediate.
    backoff_s: float = field(default_factory=lambda: BACKOFF_S)
    growth: float = 4.0
    most_s: float = 30.0  # longest pause before a worker whose engine failed restarts

    def before_restart_s(self, number: int) -> float:
        """Return the pause, in seconds, before restart `number` of a window, counted from 1."""
        return 0.0 if number == 1 else self.backoff_s * self.growth ** (number - 2)

    @property
    def window(self) -> str:
        return f"{self.window_s / 60:g} min"


@dataclass
class Budget:
    """The ends of one part, or of a gang, whose workers end together. All times are time.monotonic."""

    deaths: list[float] = field(default_factory=list)  # within the window
    engine_failures: list[float] = field(default_factory=list)  # likewise; never a reason to give up
    ended_at: float = 0.0  # the last end; any process started before then ends for the same reason
    restart_at: float = 0.0

    def died(self, now: float, patience: Patience) -> float | None:
        """Count a death; return the seconds until the restart, or None to give up."""
        self.deaths = [at for at in self.deaths if at > now - patience.window_s] + [now]
        if len(self.deaths) > patience.restarts:
            return None
        return self._ended(now, patience.before_restart_s(len(self.deaths)))

    def engine_failed(self, now: float, patience: Patience) -> float:
        """Count an engine's failure, for which a request may be to blame; return as `died` does."""
        since = now - patience.window_s
        self.engine_failures = [at for at in self.engine_failures if at > since] + [now]
        pause_s = patience.before_restart_s(len(self.engine_failures))
        return self._ended(now, min(pause_s, patience.most_s))

    def _ended(self, now: float, pause_s: float) -> float:
        self.ended_at, self.restart_at = now, now + pause_s
        return pause_s
