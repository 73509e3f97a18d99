"""Roles by name: all that differs between prefill, decode and mixed workers.

A role is what the scheduler places by. Every worker can prefill and decode, and runs what comes: so its role
can change while it works, and one side can cover for the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from baton.protos import scheduler_pb2
from baton.registry import Registry
from baton.services.config import Settings
from baton.services.errors import ConfigError

_MIN_PROMPT_TOKENS = 16  # below it a prompt's own bookkeeping, not its tokens, is what a queue holds


@dataclass(frozen=True)
class Role:
    """All that differs between workers."""

    name: str
    wire: scheduler_pb2.Role
    decodes: bool  # output is placed on it: how its drafts fare is worth a word
    # Requests held at once, running and waiting; one more is refused as FULL. The scheduler's own bound
    # is lower: this one holds when routers place from an old snapshot.
    max_requests: Callable[[Settings], int]
    # Without handoffs it would be of no use. Where they can be done without, a model whose KV cache cannot be
    # handed over (hybrids of attention and state) is served all the same.
    needs_handoffs: bool = True


def _max_prefills(settings: Settings) -> int:
    """Return as many short prompts as the tokens that the scheduler queues here make, and one full batch."""
    queued = settings.scheduler.max_queued_prompt_tokens // _MIN_PROMPT_TOKENS
    return queued + settings.engine.max_num_seqs


def _max_decodes(settings: Settings) -> int:
    """Return what the scheduler places here, and one batch more for placements from an old snapshot."""
    placed = math.ceil(settings.engine.max_num_seqs * settings.scheduler.max_queue_factor)
    return placed + settings.engine.max_num_seqs


def _max_both(settings: Settings) -> int:
    return _max_prefills(settings) + _max_decodes(settings)


# Runs prompts up to the first token, and keeps their KV until it is pulled.
PREFILL = Role("prefill", scheduler_pb2.ROLE_PREFILL, decodes=False, max_requests=_max_prefills)
# Pulls KV and decodes; prefills where no handoff came along.
DECODE = Role("decode", scheduler_pb2.ROLE_DECODE, decodes=True, max_requests=_max_decodes)
# Does both: the aggregated mode, and either side of a handoff.
MIXED = Role("mixed", scheduler_pb2.ROLE_MIXED, decodes=True, max_requests=_max_both, needs_handoffs=False)

# The protocol knows these three: other packages cannot add to them (docs/decisions/0020-one-registry.md).
ROLES: Registry[Role] = Registry(
    "role",
    Role,
    {role.name: f"{__name__}:{role.name.upper()}" for role in (PREFILL, DECODE, MIXED)},
    error=ConfigError,
)


def role(name: str) -> Role:
    """Return the role of that name. Raises ConfigError where there is none."""
    return ROLES.load(name)


def check(one: Role, settings: Settings) -> None:
    """Raise ConfigError for a role that is of no use with these settings."""
    if one.needs_handoffs and settings.handoff.enabled is False:
        raise ConfigError(
            f"handoff.enabled is false, but a {one.name} worker hands KV over: leave it out, or start mixed "
            "workers alone"
        )


def name_of(wire: scheduler_pb2.Role) -> str:
    """Return the role's name in the configuration and on the command line; empty for none."""
    name = scheduler_pb2.Role.Name(wire).removeprefix("ROLE_").lower()
    return name if name in ROLES.names() else ""
