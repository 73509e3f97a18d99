"""Define the roles, and all that differs between prefill, decode and mixed workers.

The scheduler places requests by role. Every worker can prefill and decode, and runs any request placed on it,
so its role can change while it serves and one side can cover for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.protos import scheduler_pb2
from baton.registry import Registry
from baton.services.config import Settings
from baton.services.errors import ConfigError


@dataclass(frozen=True)
class Role:
    """All that distinguishes workers of one role from those of another."""

    name: str
    wire: scheduler_pb2.Role
    decodes: bool  # output is placed on it, so it reports the acceptance of its drafts
    # If False, it also serves models whose KV cache cannot be handed over.
    needs_handoffs: bool = True


# Prefills prompts up to the first token, and keeps their KV until it is pulled.
PREFILL = Role("prefill", scheduler_pb2.ROLE_PREFILL, decodes=False)
# Pulls KV and decodes; prefills requests that come without a handoff.
DECODE = Role("decode", scheduler_pb2.ROLE_DECODE, decodes=True)
# Does both: the aggregated mode, and either side of a handoff.
MIXED = Role("mixed", scheduler_pb2.ROLE_MIXED, decodes=True, needs_handoffs=False)

# The protocol has exactly these, so other packages cannot add roles
# (docs/decisions/0021-rooms-of-the-code.md).
ROLES: Registry[Role] = Registry(
    "role",
    Role,
    {role.name: f"{__name__}:{role.name.upper()}" for role in (PREFILL, DECODE, MIXED)},
    error=ConfigError,
)


def role(name: str) -> Role:
    """Return the role of this name. Raises ConfigError if it is unknown."""
    return ROLES.load(name)


def check(one: Role, settings: Settings) -> None:
    """Raise ConfigError if a role cannot serve with these settings."""
    if one.needs_handoffs and settings.handoff.enabled is False:
        raise ConfigError(
            f"handoff.enabled is false, but a {one.name} worker needs handoffs: leave it out, or start only "
            "mixed workers"
        )


def name_of(wire: scheduler_pb2.Role) -> str:
    """Return the role's name on the command line, "" for none."""
    name = scheduler_pb2.Role.Name(wire).removeprefix("ROLE_").lower()
    return name if name in ROLES.names() else ""
