"""The certificates of a deployment on Ray: its owner, or Serve's replica of the scheduler, is the CA.

Each part joins with a token by role.

A token reaches its part through Ray with the part's settings: whoever can read Ray's messages or start actors
on the cluster can join, so Ray's own authentication and TLS guard it (docs/security.md).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from baton import addresses
from baton.home import expanded
from baton.security.authority import LIFE_S, Authority
from baton.security.join_service import JoinService
from baton.security.names import Role
from baton.services import identities
from baton.services.config import Settings
from baton.services.ray.config import WORKER_ROLES

VALID_S = 10 * 365 * 86_400.0  # of the tokens, which are revoked when the deployment ends


class Trust:
    """The CA of a deployment, which serves while entered."""

    def __init__(self, settings: Settings, host: str) -> None:
        """Open the CA of `settings`, or make it, and take on the operator's part. Raises SecurityError.

        Parts of other nodes find it at `host`, on a free port.
        """
        authority = Authority.at(expanded(settings.security.ca, "security.ca"))
        identities.take_on(settings, Role.OPERATOR)
        topic = settings.deployment
        self._tokens = authority.tokens
        self._given = {
            role: authority.tokens.add(
                role, topic, valid_s=VALID_S, uses=None, life_s=LIFE_S, pin=authority.pin
            )
            for role in (Role.SCHEDULER, Role.ROUTER, Role.WORKER, Role.OPERATOR)
        }
        self._service = JoinService(authority, topic, addresses.join(host, 0))

    async def __aenter__(self) -> Self:
        await self._service.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._service.__aexit__(kind, error, trace)
        for token in self._given.values():
            self._tokens.revoke(token.id)

    def section(self, part: str) -> dict[str, Any]:
        """Return the section `security` of a part: a role of workers, router, scheduler or operator."""
        role = Role.WORKER if part in WORKER_ROLES else Role(part)
        return {"tls": True, "join": self._service.address, "token": str(self._given[role])}
