"""The settings of an operator's command: they reach a scheduler, and let it in."""

from __future__ import annotations

from baton.services.config import Settings

OPERATORS = (
    *("scheduler.address", "scheduler.topic"),
    *(f"security.{key}" for key in ("tls", "ca", "join", "token", "token_file", "folder")),
)


def become_operator(settings: Settings) -> None:
    """Give this process an operator's identity. Raises SecurityError and ConfigError."""
    from baton.security.names import Role
    from baton.services import identities  # gRPC, which takes a third of a second of `baton --help`

    identities.take_on(settings, Role.OPERATOR)
