"""Give a request's grammar a time budget in the engine, because its steps hold up the whole batch.

The walk in the trial (`walk`) visits few of a grammar's states. A grammar that becomes costly later ends its
request here: accept_tokens returns False, whereupon vLLM's scheduler ends the request with FINISHED_ERROR,
and `problem` says why.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

# CPU seconds that a grammar may take in steps: a base amount, and more for each token or draft that it masks.
BURST_S = 0.5
TOKEN_S = 0.01


class Metered(StructuredOutputGrammar):
    """A grammar that counts its CPU time, which costs 0.5 us per call."""

    def __init__(self, grammar: StructuredOutputGrammar, fed: int = 0) -> None:
        """Start counting. fed: how many tokens of the answer the grammar has already accepted."""
        self._grammar = grammar
        self._fed = fed
        self._spent = 0.0
        self._tokens = 0  # tokens accepted since counting started
        self._masks = 0  # one per token and per draft
        self._costly = ""  # why the grammar costs too much, if it does
        self._rejected = ""  # why a token, perhaps a draft, was rejected

    @property
    def problem(self) -> str:
        return self._costly or self._rejected

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Accept tokens. Return False if one is not allowed or the grammar has cost too much."""
        if self._is_over():
            return False
        began = time.thread_time()
        accepted: bool = self._grammar.accept_tokens(request_id, tokens)
        self._spent += time.thread_time() - began
        self._tokens += len(tokens)
        if not accepted and not self._rejected:
            before = self._fed + self._tokens - len(tokens)
            self._rejected = (
                f"after {before} tokens of the answer, its grammar allows no token that the request's other "
                "fields allow"
            )
        return accepted

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the leading tokens that are allowed, or none if the grammar has cost too much."""
        if self._is_over():
            return []
        began = time.thread_time()
        valid: list[int] = self._grammar.validate_tokens(tokens)
        self._spent += time.thread_time() - began
        return valid

    def rollback(self, num_tokens: int) -> None:
        began = time.thread_time()
        self._grammar.rollback(num_tokens)
        self._spent += time.thread_time() - began
        self._tokens -= num_tokens

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Write the mask of allowed tokens, or allow all if the grammar has cost too much."""
        if self._is_over():
            bitmask[batch_index].fill_(-1)
            return
        began = time.thread_time()
        self._grammar.fill_bitmask(bitmask, batch_index)
        self._masks += 1
        self._spent += time.thread_time() - began

    def is_terminated(self) -> bool:
        return not self._costly and bool(self._grammar.is_terminated())

    def reset(self) -> None:
        self._grammar.reset()

    def _is_over(self) -> bool:
        if self._spent > BURST_S + TOKEN_S * self._masks:
            self._costly = (
                f"this grammar is too costly: {self._spent:.1f} s of the engine's time for {self._tokens} "
                "tokens; use fewer alternatives, and repetitions with smaller bounds"
            )
            return True
        return False


def problem_of(request: Any) -> str:
    """Return why a request was ended because of its grammar, or "" if it was not."""
    asked = request.structured_output_request
    return str(getattr(asked.grammar, "problem", "")) if asked is not None else ""
