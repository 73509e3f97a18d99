"""Move a thinking budget together with its request.

vLLM's V1 keeps budgets by batch row. A request that moves into the row of an ended request gets that
request's budget, which forces it to end a thought that it never began. And if an engine that drafts runs a
step without drafts, the end of a thought goes into row 0: budgets apply to one row per draft if
`in_spec_mode` is set.
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.patches.replace import replaces


@replaces("vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.sync_batch")
def _clear_overwritten_rows(original: Any, self: Any, batch_update: Any) -> None:
    from vllm.v1.sample.logits_processor import MoveDirectionality

    if batch_update and self._state:
        for _, row, direction in batch_update.moved:
            if direction == MoveDirectionality.UNIDIRECTIONAL:  # into the row of a request that ended
                self._state.pop(row, None)
    original(self, batch_update)


@replaces("vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.apply_to_logits")
def _apply_by_request(
    original: Any, self: Any, logits: Any, predict_bonus_token: bool, spec_token_ids: Any
) -> Any:
    drafts = self.in_spec_mode
    self.in_spec_mode = drafts and (predict_bonus_token or any(spec_token_ids or ()))
    try:
        return original(self, logits, predict_bonus_token, spec_token_ids)
    finally:
        self.in_spec_mode = drafts
