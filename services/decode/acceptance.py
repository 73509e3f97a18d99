"""Count accepted drafts, keep the counts of the last minute, and raise an alarm if too few are accepted.

A broken drafter goes unnoticed: the output is still correct, only slower. It shows in the acceptance rate of
the first drafted position, which does not depend on the draft length. Drafts of one request are correlated,
so requests are the sampling units, and the rate's error is that of a ratio over clusters (Cochran, Sampling
Techniques, 1977, chapter 6).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import zip_longest

WINDOW_S = 60.0
_SLOT_S = 5.0

# Sizes of the window of recent requests. In simulation, with acceptance per request distributed as Beta(mean
# x s, (1 - mean) x s) and s from 2 (nearly uniform) to 50, they raised no false alarm in 1,200,000 requests,
# and detected a loss of 35 % in 118 of 120 runs, after some 150 requests. With windows of 64 requests, and
# the reference lowered by two errors instead of four, there were 190 false alarms.
LEAST_DRAFTS = 200  # a smaller window is not judged
LEAST_REQUESTS = 64
FULL_DRAFTS = 1000
FULL_REQUESTS = 256
MOST_REQUESTS = 4096  # limits memory if requests have few drafts

ALARM_BELOW = 0.8  # share of the reference
CLEAR_ABOVE = 0.9  # share of the reference; higher, so that one good request does not clear the alarm
SIGMAS = 4.0
LEARN_SIGMAS = 4.0  # standard errors by which a learned reference is lowered: the best window is partly luck
FRUITLESS_DRAFTS = 200  # this many drafts in a row without an accepted token raise the alarm
FRUITFUL_TOKENS = 5  # accepted tokens that then clear it


@dataclass(slots=True)
class DraftCounts:
    """Verified drafts; index 0 is the first position. drafts >= drafted[0] >= ..., drafted >= accepted."""

    drafts: int = 0
    drafted: list[int] = field(default_factory=list)  # tokens by position
    accepted: list[int] = field(default_factory=list)

    def add(self, other: DraftCounts) -> None:
        self.drafts += other.drafts
        self.drafted = _sum(self.drafted, other.drafted)
        self.accepted = _sum(self.accepted, other.accepted)

    @property
    def drafted_tokens(self) -> int:
        return sum(self.drafted)

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted)

    @property
    def length(self) -> int:
        return sum(1 for count in self.drafted if count)

    @property
    def mean_accepted_length(self) -> float:
        """Output tokens of a request per step with a draft: the accepted ones and the model's own."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 0.0

    @property
    def first_acceptance(self) -> float:
        """Acceptance rate of the first drafted tokens; 0 without drafts."""
        return self.accepted[0] / self.drafted[0] if self.drafted and self.drafted[0] else 0.0


def _sum(one: list[int], other: list[int]) -> list[int]:
    return [left + right for left, right in zip_longest(one, other, fillvalue=0)]


class RecentDrafts:
    """The counts of the last minute, in slots of 5 s."""

    def __init__(self) -> None:
        self._slots: deque[tuple[float, DraftCounts]] = deque()  # (start of the slot in seconds, counts)

    def add(self, counts: DraftCounts, now: float) -> None:
        if not self._slots or now >= self._slots[-1][0] + _SLOT_S:
            self._slots.append((now, DraftCounts()))
            self._forget(now)
        self._slots[-1][1].add(counts)

    def total(self, now: float) -> DraftCounts:
        self._forget(now)
        total = DraftCounts()
        for _, counts in self._slots:
            total.add(counts)
        return total

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= now - WINDOW_S:
            self._slots.popleft()


class _Window:
    """The last requests, each as (drafts, drafts whose first token was accepted), and their sums."""

    def __init__(self) -> None:
        self._requests: deque[tuple[int, int]] = deque()
        self.drafts = self._accepted = 0
        self._squares = [0, 0, 0]  # sums of drafts squared, accepted squared, their product

    def add(self, drafts: int, accepted: int) -> None:
        self._requests.append((drafts, accepted))
        self._count(drafts, accepted, 1)
        while self._spare():
            self._count(*self._requests.popleft(), -1)

    def _count(self, drafts: int, accepted: int, sign: int) -> None:
        self.drafts += sign * drafts
        self._accepted += sign * accepted
        for index, product in enumerate((drafts * drafts, accepted * accepted, drafts * accepted)):
            self._squares[index] += sign * product

    def _spare(self) -> bool:
        if len(self._requests) > MOST_REQUESTS:
            return True
        full = len(self._requests) > FULL_REQUESTS
        return full and self.drafts - self._requests[0][0] >= FULL_DRAFTS

    @property
    def telling(self) -> bool:
        return len(self._requests) >= LEAST_REQUESTS and self.drafts >= LEAST_DRAFTS

    @property
    def full(self) -> bool:
        return len(self._requests) >= FULL_REQUESTS and self.drafts >= FULL_DRAFTS

    @property
    def share(self) -> float:
        return self._accepted / self.drafts if self.drafts else 0.0

    def error(self, expected: float) -> float:
        """Return the share's standard error over requests, at least that of independent drafts."""
        count, share = len(self._requests), self.share
        of_drafts, of_accepted, of_both = self._squares
        residuals = of_accepted - 2 * share * of_both + share * share * of_drafts
        clustered = math.sqrt(max(0.0, residuals) * count / max(1, count - 1)) / self.drafts
        return max(clustered, math.sqrt(expected * (1 - expected) / self.drafts))


class AcceptanceWatch:
    """Detects a drafter whose acceptance is too low. For one thread.

    Two rules raise the alarm. *Low*: the share over the window is below 0.8 of the reference, and more than
    four standard errors from it; cleared above 0.9. *Fruitless*: no token of the last 200 drafts was
    accepted, whatever the reference.

    The reference is configured, or the best full window of this worker or of a peer with the same method. A
    method that only matches text learns none (`learns` is False): its acceptance depends on the text, and it
    has no state to lose.
    """

    def __init__(self, *, configured: float | None = None, learns: bool = True) -> None:
        """Compare with `configured`, an acceptance rate of the first position (0 to 1), or learn one."""
        self._configured = configured
        self._learns = learns
        self._window = _Window()
        self._peers = 0.0
        self._low = False
        self._fruitless = 0  # drafts since the last accepted token
        self._fruits = FRUITFUL_TOKENS  # accepted tokens since the last fruitless alarm
        self.learned = 0.0  # the best share of a full window, less LEARN_SIGMAS standard errors

    @property
    def reference(self) -> float:
        """The expected acceptance rate; 0 while it is unknown."""
        if self._configured is not None:
            return self._configured
        return max(self.learned, self._peers) if self._learns else 0.0

    @property
    def alarm(self) -> bool:
        return self._low or self._fruits < FRUITFUL_TOKENS

    def drafted(self, counts: DraftCounts) -> None:
        accepted = counts.accepted_tokens
        if accepted:
            self._fruitless = 0
            self._fruits = min(self._fruits + accepted, FRUITFUL_TOKENS)
        else:
            self._fruitless += counts.drafts
            if self._fruitless >= FRUITLESS_DRAFTS:
                self._fruits = 0

    def finished(self, drafts: int, accepted: int) -> None:
        """Count a finished request: its drafts, and how many of them had their first token accepted."""
        if not drafts:
            return
        self._window.add(drafts, accepted)
        self._judge()
        if self._learns and self._window.full and not self.alarm:
            share = self._window.share
            self.learned = max(self.learned, share - LEARN_SIGMAS * self._window.error(share))

    def hear(self, peers: float) -> None:
        """Set the best reference of other workers with this method; 0 if there is none."""
        self._peers = peers
        self._judge()

    def _judge(self) -> None:
        reference, window = self.reference, self._window
        if not reference or not window.telling:
            return
        if self._low:
            self._low = window.share < CLEAR_ABOVE * reference
        else:
            below = window.share < ALARM_BELOW * reference
            self._low = below and reference - window.share > SIGMAS * window.error(reference)

    @property
    def why(self) -> str:
        if self._fruits < FRUITFUL_TOKENS:
            return f"no token of the last {max(self._fruitless, FRUITLESS_DRAFTS)} drafts was accepted"
        return (
            f"the first drafted token was accepted in {self._window.share:.3f} of "
            f"{self._window.drafts} drafts, the reference is {self.reference:.3f}"
        )
