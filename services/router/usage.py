"""Compute the cost of a response for `usage.baton` and the log (docs/observability.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.services.router.state import RequestState
from baton.services.router.timings import Spent


def usage_of(states: Iterable[RequestState]) -> dict[str, Any]:
    """Return the cost of one response: counts summed over its sequences, and the longest durations.

    Both include failed attempts, as far as their workers reported them.
    """
    states = list(states)
    each = [state.spent for state in states]
    drafts = sum(each, Spent())
    steps, at_position = drafts.draft_steps, drafts.accepted_by_position
    accepted = sum(at_position)
    longest = ("queue_ms", "prefill_ms", "handoff_ms", "decode_ms")
    return {
        "method": _names(state.method for state in states),
        "draft_steps": steps,
        "drafted_tokens": drafts.drafted_tokens,
        "accepted_tokens": accepted,
        "mean_accepted_length": round(1 + accepted / steps, 4) if steps else None,
        "acceptance_by_position": [round(count / steps, 4) for count in at_position] if steps else [],
        "prefill_worker": _names(worker for state in states for worker in state.prefill_workers),
        "decode_worker": _names(worker for state in states for worker in state.decode_workers),
        "attempts": max(state.attempts for state in states),
        "waiting_ms": max(round(1e3 * state.waited_s, 3) for state in states),
        **{name: max(round(getattr(spent, name), 3) for spent in each) for name in longest},
    }


def _names(values: Iterable[str]) -> str | None:
    """Join the distinct non-empty values in order."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or None
