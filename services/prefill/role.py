"""A prefill worker: reads prompts, writes one token each, keeps the KV cache until it is pulled."""

from __future__ import annotations

from baton.protos import scheduler_pb2
from baton.services.config import Settings
from baton.services.roles import Role

_MIN_PROMPT_TOKENS = 16  # below it a prompt's own bookkeeping, not its tokens, is what a queue holds


def _max_requests(settings: Settings) -> int:
    """As many short prompts as the tokens that the scheduler queues here, and one full batch."""
    queued = settings.scheduler.max_queued_prompt_tokens // _MIN_PROMPT_TOKENS
    return queued + settings.engine.max_num_seqs


PREFILL = Role(
    name="prefill",
    wire=scheduler_pb2.ROLE_PREFILL,
    writes=False,
    max_requests=_max_requests,
)
