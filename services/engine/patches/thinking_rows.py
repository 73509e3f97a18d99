"""Keep a thinking budget to its own request's row of the batch.

vLLM's V1 keeps budgets by row of the batch. When a request with a budget ends and another moves into its row,
the budget stays, and forces the other's answer to end a thought that it never began. And when an engine that
drafts has a step without any drafts, the end of a thought goes into row 0, whichever request is there.

Leans on: vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder (sync_batch, which passes over what
was in a row that another is moved to; apply_to_logits, which takes a row for each draft if in_spec_mode, and
one for each request with predict_bonus_token; _state, by row);
vllm.v1.sample.logits_processor.{BatchUpdate (moved), MoveDirectionality}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    replace(ThinkingBudgetStateHolder, "sync_batch", _emptying_rows, ("self", "batch_update"))
    apply = ("self", "logits", "predict_bonus_token", "spec_token_ids")
    replace(ThinkingBudgetStateHolder, "apply_to_logits", _by_requests, apply)


def _emptying_rows(original: Callable[..., None]) -> Callable[..., None]:
    def sync_batch(self: Any, batch_update: Any) -> None:
        from vllm.v1.sample.logits_processor import MoveDirectionality

        if batch_update and self._state:
            for _, row, direction in batch_update.moved:
                if direction == MoveDirectionality.UNIDIRECTIONAL:  # into the row of a request that has ended
                    self._state.pop(row, None)
        original(self, batch_update)

    return sync_batch


def _by_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_to_logits(self: Any, logits: Any, predict_bonus_token: bool, spec_token_ids: Any) -> Any:
        drafts = self.in_spec_mode
        self.in_spec_mode = drafts and (predict_bonus_token or any(spec_token_ids or ()))
        try:
            return original(self, logits, predict_bonus_token, spec_token_ids)
        finally:
            self.in_spec_mode = drafts

    return apply_to_logits
