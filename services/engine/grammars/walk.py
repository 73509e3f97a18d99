"""Walk through a compiled grammar to find what its steps cost, and whether a request can follow it at all.

vLLM's bitmask of allowed tokens is int32, with one bit per token, lowest first.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

# CPU seconds for one call in an engine's step, and for all calls per token on average. With a vocabulary of
# 150,000 tokens, 10,000 choices took 9 and 7 ms, a schema of 20 KB 0.3 and 0.02 ms, and `(a{1,1000}){1,1000}`
# 126 and 45 ms.
MOST_CALL_S = 0.06
MOST_TOKEN_S = 0.01
STEPS = 64
STATES = 200  # maximum visited to show that a request's other fields exclude all answers of its grammar


class TooCostly(Exception):
    """A step with this grammar would take the engine too long."""

    def __init__(self, took_ms: float, each: str, most_ms: float) -> None:
        super().__init__(
            f"this grammar is too costly: a {each} takes {took_ms:.0f} ms of the engine's time, "
            f"{most_ms:.0f} ms are allowed; use fewer alternatives, and repetitions with smaller bounds"
        )


class Walker:
    def __init__(self, grammar: Any, backend: Any, params: Any, *, thinks: bool = False) -> None:
        """Prepare. thinks: the answer may begin with a thought, whose tokens only min_tokens counts."""
        self._grammar = grammar
        self._bitmask = backend.allocate_token_bitmask(1)
        self._vocabulary = self._bitmask.shape[1] * 32
        self._min_tokens = 0 if thinks else params.min_tokens or 0
        self._most_tokens = min(STEPS, params.max_tokens or STEPS)
        self._stops = np.zeros(self._vocabulary, dtype=bool)
        self._stops[[one for one in params.all_stop_token_ids if one < self._vocabulary]] = True
        self._open = self._allowed(params)

    def _allowed(self, params: Any) -> Any:
        """Return which tokens the request's other fields never forbid; None if they forbid no token."""
        allowed = None
        if params.allowed_token_ids:
            allowed = np.zeros(self._vocabulary, dtype=bool)
            allowed[[one for one in params.allowed_token_ids if one < self._vocabulary]] = True
        single = [word[0] for word in params.bad_words_token_ids or () if len(word) == 1]
        if single:
            allowed = np.ones(self._vocabulary, dtype=bool) if allowed is None else allowed
            allowed[[one for one in single if one < self._vocabulary]] = False
        return allowed

    def measure(self) -> None:
        """Walk along random tokens, then along the first allowed ones, which are short. Raises TooCostly."""
        draw = random.Random(0)  # noqa: S311 (the walk must be repeatable)
        for pick in (lambda found: found[draw.randrange(len(found))], lambda found: found[0]):
            self._grammar.reset()
            self._measure(pick)
        self._grammar.reset()

    def _measure(self, pick: Any) -> None:
        spent, tokens = 0.0, 0
        self._next()
        for _ in range(STEPS):
            found = np.flatnonzero(self._mask() & ~self._stops)
            if not len(found):
                return
            token = int(pick(found))
            began = time.thread_time()
            taken = self._grammar.accept_tokens("", [token])
            accepted = time.thread_time()
            if not taken or self._grammar.is_terminated():
                return
            self._next()
            ended = time.thread_time()
            tokens, spent = tokens + 1, spent + ended - began
            if max(accepted - began, ended - accepted) > MOST_CALL_S:
                raise TooCostly(1e3 * max(accepted - began, ended - accepted), "step", 1e3 * MOST_CALL_S)
            if spent > MOST_CALL_S and spent > MOST_TOKEN_S * max(tokens, STEPS // 4):
                raise TooCostly(1e3 * spent / tokens, "token", 1e3 * MOST_TOKEN_S)

    def can_begin(self) -> bool:
        self._grammar.reset()
        self._next()
        return bool(self._mask().any())

    def can_be_followed(self) -> bool:
        """Return False if the request's other fields exclude all answers, as far as STATES states show."""
        if self._open is None and not self._min_tokens:
            return True
        waiting: list[tuple[int, ...]] = [()]
        for _ in range(STATES):
            if not waiting:
                return False
            path = waiting.pop()
            further = self._after(path)
            if further is None or len(further) + len(waiting) > STATES:
                return True
            waiting.extend((*path, token) for token in further)
        return True

    def _after(self, path: tuple[int, ...]) -> list[int] | None:
        """Return the tokens that may follow `path`, or None if the answer may end there or is long enough."""
        if len(path) >= self._most_tokens:
            return None
        self._grammar.reset()
        if path and not self._grammar.accept_tokens("", list(path)):
            return []
        if path and self._grammar.is_terminated():
            return None
        self._next()
        mask = self._mask()
        if self._open is not None:
            mask &= self._open
        if len(path) >= self._min_tokens and (mask & self._stops).any():
            return None
        return [int(token) for token in np.flatnonzero(mask & ~self._stops)]

    def _next(self) -> None:
        self._bitmask.fill_(0)
        self._grammar.fill_bitmask(self._bitmask, 0)

    def _mask(self) -> Any:
        bits = self._bitmask[0].numpy().view(np.uint8)
        return np.unpackbits(bits, bitorder="little").astype(bool)
