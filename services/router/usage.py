"""The cost of a response, for `usage.baton` and the log."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, Field

from baton.services.router.state import RequestState
from baton.services.router.timings import Spent


class Usage(BaseModel):
    """The cost of a response. Over several sequences (n, several prompts): sums of counts, longest durations.

    If workers failed, counts and durations are sums over all attempts, as far as they were reported.
    """

    method: str | None = Field(description="Speculative method; null without speculation.")
    draft_steps: int = Field(description="Steps that verified a draft.")
    drafted_tokens: int = Field(description="Tokens drafted.")
    accepted_tokens: int = Field(description="Drafted tokens that were accepted.")
    mean_accepted_length: float | None = Field(
        description="Tokens generated per step with a draft: the accepted ones and one more; null without."
    )
    acceptance_by_position: list[float] = Field(
        description="Share of the draft steps in which the token drafted at this position was accepted."
    )
    prefill_worker: str | None = Field(description="Worker that prefilled the prompt.")
    decode_worker: str | None = Field(
        description="Worker that decoded from the second token on, if there is one."
    )
    attempts: int = Field(description="Placements tried.")
    waiting_ms: float = Field(description="In the router, until there was room on the workers.")
    queue_ms: float = Field(description="From the placement to the prefill's first step.")
    prefill_ms: float = Field(description="From the placement to the first token, the queue included.")
    handoff_ms: float = Field(description="From the first token until the decode worker has the KV cache.")
    decode_ms: float = Field(description="From then to the last token.")


def usage_of(states: Iterable[RequestState]) -> Usage:
    """Return the figures of one response's sequences, at least one."""
    states = list(states)
    each = [state.spent for state in states]
    drafts = sum(each, Spent())
    steps, at_position = drafts.draft_steps, drafts.accepted_by_position
    accepted = sum(at_position)
    return Usage(
        method=_names(state.method for state in states),
        draft_steps=steps,
        drafted_tokens=drafts.drafted_tokens,
        accepted_tokens=accepted,
        mean_accepted_length=round(1 + accepted / steps, 4) if steps else None,
        acceptance_by_position=[round(count / steps, 4) for count in at_position] if steps else [],
        prefill_worker=_names(worker for state in states for worker in state.prefill_workers),
        decode_worker=_names(worker for state in states for worker in state.decode_workers),
        attempts=max(state.attempts for state in states),
        waiting_ms=max(round(1e3 * state.waited_s, 3) for state in states),
        queue_ms=max(round(spent.queue_ms, 3) for spent in each),
        prefill_ms=max(round(spent.prefill_ms, 3) for spent in each),
        handoff_ms=max(round(spent.handoff_ms, 3) for spent in each),
        decode_ms=max(round(spent.decode_ms, 3) for spent in each),
    )


def _names(values: Iterable[str]) -> str | None:
    """Join the distinct values in order: usually one, several where sequences or attempts went apart."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or None
