"""Estimate the benefit and the cost of drafting from measured steps.

Acceptance      tokens that a step generates per request, by draft length
StepTimeModel   seconds of a step, by batch size and draft length

Both forget old steps, and take a few microseconds per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Acceptance remembers this many rows (a row is a request in a step), or the rows of this many steps if those
# are more. Rows of positions that are not drafted now fade, until a few new ones outweigh them.
_ROWS_KEPT = 200.0
_ROW_STEPS_KEPT = 50.0
_ROWS_KEPT_UNSEEN = 16.0
_UNSEEN_FADES = 0.99
_HOPED_ACCEPTANCE = 0.8  # the prior; high, so that longer drafts are tried
_HOPED_ROWS = 2.0

_FEATURES = 5
_STEPS_KEPT = 0.995  # the part of the fit's weight that is kept per step
# Prior of the fit, in units of the first step's time: fixed cost, per request, per verified token, per pass
# of the draft model, and per pass and request.
_GUESS = (0.85, 0.02, 0.03, 0.08, 0.01)
_GUESS_WEIGHT = 0.5  # steps
_CLIP = 0.25  # an outlier counts as at most this far off, relative to the expected time
_CELL_SAMPLES = 32.0  # steps that a cell averages over
_LINE_SAMPLES = 3.0  # the fit weighs as much as this many samples of a cell
_PACE_GAIN = 1 / 16
_SURPRISES = 5  # this many steps in a row, all faster or all slower by more than _CLIP, mean a new pace
# The first use of a kernel may wait seconds for its compiler. Later steps that are much faster, for which
# there is no other reason, reveal such a wait.
_MUCH_FASTER = 0.5  # share of an earlier step's time
_FIRST_SAMPLES = 4.0  # a cell's first samples
_FIRST_STEPS = 16  # an engine's first steps


@dataclass
class _Share:
    """A conditional probability, from counts that fade."""

    of: float = 0.0
    hits: float = 0.0

    def add(self, of: float, hits: float, kept: float) -> None:
        self.of = self.of * kept + of
        self.hits = self.hits * kept + hits

    def fade(self) -> None:
        if self.of > _ROWS_KEPT_UNSEEN:
            self.of *= _UNSEEN_FADES
            self.hits *= _UNSEEN_FADES

    def value(self, hoped: float) -> float:
        return (self.hits + _HOPED_ROWS * hoped) / (self.of + _HOPED_ROWS)


class Acceptance:
    """Acceptance by position, relative to the rows that got that far; the products are the benefit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._accepted = [_Share() for _ in range(limit)]
        self._drafted = [_Share() for _ in range(limit)]

    def observe(self, rows: int, asked: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn how many of `rows` requests drafted and accepted a token at each of `asked` positions."""
        before_drafted = before_accepted = rows
        kept = 1.0 - min(rows / _ROWS_KEPT, 1.0 / _ROW_STEPS_KEPT)
        for position in range(self.limit):
            if position >= asked:
                self._accepted[position].fade()
                self._drafted[position].fade()
                continue
            self._drafted[position].add(before_drafted, drafted[position], kept)
            self._accepted[position].add(before_accepted, accepted[position], kept)
            before_drafted, before_accepted = drafted[position], accepted[position]

    def tokens(self) -> list[float]:
        """Return the tokens that a step generates per request; [limit + 1], by draft length."""
        return _sums(1.0, self._accepted, _HOPED_ACCEPTANCE)

    def drafts(self) -> list[float]:
        """Return the tokens that are drafted and verified per request; [limit + 1], by draft length."""
        return _sums(0.0, self._drafted, 1.0)


def _sums(first: float, shares: Sequence[_Share], hoped: float) -> list[float]:
    sums, chance = [first], 1.0
    for share in shares:
        chance *= share.value(hoped)
        sums.append(sums[-1] + chance)
    return sums


@dataclass
class _Cell:
    """Measured steps of one bucket of batch sizes and one draft length; its seconds are at pace 1."""

    seconds: float
    requests: float
    tokens: float
    samples: float = 1.0


@dataclass
class _Fit:
    """Non-negative least squares with forgetting: seconds (at pace 1) as a weighted sum of features.

    Errors are relative to a step's time. `solve` does one sweep of coordinate descent from the last solution.
    The prior decides between features that the steps do not tell apart.
    """

    weights: list[float] = field(default_factory=lambda: list(_GUESS))
    squares: list[list[float]] = field(default_factory=lambda: [[0.0] * _FEATURES for _ in range(_FEATURES)])
    products: list[float] = field(default_factory=lambda: [0.0] * _FEATURES)

    def add(self, features: Sequence[float], seconds: float) -> None:
        scale = 1.0 / (seconds * seconds)
        for row, (one, line) in enumerate(zip(features, self.squares, strict=True)):
            weighted = one * scale
            self.products[row] = self.products[row] * _STEPS_KEPT + weighted * seconds
            for column, other in enumerate(features):
                line[column] = line[column] * _STEPS_KEPT + weighted * other

    def solve(self) -> None:
        weights = self.weights
        for row, line in enumerate(self.squares):
            own = line[row]
            rest = sum(a * b for a, b in zip(line, weights, strict=True)) - own * weights[row]
            guessed = _GUESS_WEIGHT
            weights[row] = max(0.0, (self.products[row] - rest + guessed * _GUESS[row]) / (own + guessed))


class StepTimeModel:
    """The seconds of a step, from a fit over all steps and the mean of similar ones.

    The fit is linear and extrapolates to batches and draft lengths that were not run; where there are
    measured steps, their mean (a cell) corrects it. Changes common to all steps (longer contexts, a busy
    machine) are tracked separately, as the pace: a length tried a while ago must not look cheap because the
    machine was idle then.
    """

    def __init__(self, limit: int, passes: Sequence[int]) -> None:
        """Expect `passes` [limit + 1] of the draft model, by draft length."""
        self._passes = passes
        self._fit = _Fit()
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._pace = 0.0  # seconds of the first step, then adjusted by later ones
        self._surprises: list[float] = []
        self._limit = limit
        self._steps = 0

    def observe(
        self, requests: int, tokens: float, limit: int, seconds: float, *, settled: bool, probe: bool
    ) -> None:
        """Learn from a step without prefill, which verified `tokens` tokens in all.

        settled: the step before had the same limit, so it verified as many drafts as it made
        probe: the step was run to learn about its limit, so it does not change the pace
        """
        self._steps += 1
        self._forget_compiling(requests, tokens, limit, seconds)
        key = bucket(requests), limit
        cell = self._cells.get(key) if settled else None
        off = seconds / (self._pace * self._expected(requests, tokens, limit, cell)) - 1.0
        if self._pace_changed(off, known=cell is not None and cell.samples >= 4):
            return
        off = min(max(off, -_CLIP), _CLIP)
        if cell is None:
            if settled:
                self._cells[key] = _Cell(
                    min(seconds / self._pace, 4 * self._line(requests, tokens, limit)), requests, tokens
                )
        elif probe or cell.samples < _CELL_SAMPLES:
            cell.samples = min(cell.samples + 1.0, _CELL_SAMPLES)
            gain = 1.0 / cell.samples
            cell.seconds *= 1.0 + gain * off
        else:
            self._pace *= 1.0 + _PACE_GAIN * off
        expected = self._expected(requests, tokens, limit, cell)
        passes = self._passes[limit]
        self._fit.add((1.0, requests, tokens, passes, passes * requests), expected * (1.0 + off))

    def _forget_compiling(self, requests: int, tokens: float, limit: int, seconds: float) -> None:
        """Forget earlier steps that waited for a compiler, if this one reveals them."""
        key = bucket(requests), limit
        line, cell = self._line(requests, tokens, limit), self._cells.get(key)
        far = _MUCH_FASTER * _MUCH_FASTER
        if not self._pace or (self._steps <= _FIRST_STEPS and seconds < far * self._pace * line):
            self._fit = _Fit()
            self._cells.clear()
            self._pace = seconds / self._line(requests, tokens, limit)
        elif cell is not None and cell.samples < _FIRST_SAMPLES and tokens >= cell.tokens:
            here = cell.seconds * line / self._line(cell.requests, cell.tokens, limit)
            if seconds < _MUCH_FASTER * self._pace * here:
                del self._cells[key]

    def solve(self) -> None:
        """Update the fit; not needed after every step."""
        self._fit.solve()

    def seconds(self, requests: int, tokens: float, limit: int) -> float:
        """Return the seconds of a step; before any was measured, in units of the first step's time."""
        cell = self._cells.get((bucket(requests), limit))
        return (self._pace or 1.0) * self._expected(requests, tokens, limit, cell)

    def samples(self, requests: int, limit: int) -> float:
        """Return the number of measured steps of this kind, at most _CELL_SAMPLES."""
        cell = self._cells.get((bucket(requests), limit))
        return cell.samples if cell else 0.0

    def _expected(self, requests: int, tokens: float, limit: int, cell: _Cell | None) -> float:
        line = self._line(requests, tokens, limit)
        if cell is None:
            return line
        here = cell.seconds * line / self._line(cell.requests, cell.tokens, limit)
        return (_LINE_SAMPLES * line + here * cell.samples) / (_LINE_SAMPLES + cell.samples)

    def _line(self, requests: float, tokens: float, limit: int) -> float:
        fixed, request, token, one_pass, pass_request = self._fit.weights
        passes = self._passes[limit]
        return max(
            fixed + request * requests + token * tokens + passes * (one_pass + pass_request * requests), 1e-3
        )

    def _pace_changed(self, off: float, *, known: bool) -> bool:
        """Adopt a new pace if several well-known steps in a row were far off; return whether it did."""
        surprises = self._surprises
        if not known or abs(off) <= _CLIP or (surprises and (surprises[-1] > 0) != (off > 0)):
            surprises.clear()
        if not known or abs(off) <= _CLIP:
            return False
        surprises.append(off)
        if len(surprises) < _SURPRISES:
            return False
        self._pace *= 1.0 + sorted(surprises)[_SURPRISES // 2]
        surprises.clear()
        return True


def bucket(requests: int) -> int:
    """Return the group of a batch size: 1, 2, 3 to 4, 5 to 8, ..."""
    return (requests - 1).bit_length()
