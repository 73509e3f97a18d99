"""The settings that operators' commands need to reach a scheduler and to be authorised by it."""

from __future__ import annotations

from baton.services.config import Settings
from baton.services.models import models_of

OPERATORS = (
    *("scheduler.address", "scheduler.topic"),
    *(f"security.{key}" for key in ("tls", "ca", "join", "token", "folder")),
)


def addresses_of(settings: Settings) -> dict[str, str]:
    """Return the schedulers' addresses by model; a configuration without `models:` has one model named ""."""
    if not settings.models:
        return {"": settings.scheduler.address}
    return {one.name: one.settings.scheduler.address for one in models_of(settings)}


def become_operator(settings: Settings) -> None:
    """Give this process an operator's identity. Raises SecurityError and ConfigError."""
    from baton.security.names import Role
    from baton.services import identities  # late: gRPC would add a third of a second to `baton --help`

    identities.take_on(settings, Role.OPERATOR)
