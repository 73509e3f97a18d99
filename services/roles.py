"""What makes a worker a prefill, a decode or a mixed one: one object a role, found by name.

A role is what the scheduler places by. Every worker can read and write, and runs what comes: so a role can
change while it works, and one side can cover for the other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from baton.protos import scheduler_pb2
from baton.services.config import Settings
from baton.services.errors import ConfigError


@dataclass(frozen=True)
class Role:
    """All that differs between workers."""

    name: str
    wire: scheduler_pb2.Role
    writes: bool  # answers are placed on it: how its drafts fare is worth a word
    # Requests held at once, running and waiting; one more is refused as FULL. The scheduler's own bound
    # is lower: this one holds when routers place from an old snapshot.
    max_requests: Callable[[Settings], int]
    # Without handoffs it would be of no use. Where they can be done without, a model whose KV cache cannot be
    # handed over (hybrids of attention and state) is served all the same.
    needs_handoffs: bool = True


_ROLES: dict[str, tuple[str, str]] = {}


def register(name: str, module: str, attribute: str) -> None:
    """Make a role known by name; it is imported when it is asked for. Raises ValueError for a second one."""
    if name in _ROLES:
        raise ValueError(f"role {name!r} is registered already, by {_ROLES[name][0]}")
    _ROLES[name] = (module, attribute)


def role(name: str) -> Role:
    """The role of that name. Raises ConfigError for one that is not registered."""
    if name not in _ROLES:
        raise ConfigError(f"role {name!r} does not exist; allowed: {', '.join(sorted(_ROLES))}")
    module, attribute = _ROLES[name]
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, Role):
        raise TypeError(f"{module}.{attribute} is a {type(found).__name__}, not a Role")
    return found


def check(one: Role, settings: Settings) -> None:
    """Raises ConfigError for a role that is of no use with these settings."""
    if one.needs_handoffs and settings.handoff.enabled is False:
        raise ConfigError(
            f"handoff.enabled is false, but a {one.name} worker hands KV over: leave it out, or start mixed "
            "workers alone"
        )


def name_of(wire: scheduler_pb2.Role) -> str:
    """As the configuration and the command line say it; empty for none."""
    name = scheduler_pb2.Role.Name(wire).removeprefix("ROLE_").lower()
    return name if name in _ROLES else ""


register("prefill", "baton.services.prefill.role", "PREFILL")
register("decode", "baton.services.decode.role", "DECODE")
register("mixed", "baton.services.worker.mixed", "MIXED")
