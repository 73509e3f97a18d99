"""The certificates of a deployment on Ray: its owner, or Serve's replica of the scheduler, is the CA.

With TLS, each part joins with a token for its role, which it gets with its settings through Ray. So anyone
who can read Ray's messages or start actors can join; Ray's own authentication and TLS must prevent that
(docs/security.md).
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Any, Self

from baton import addresses
from baton.home import expanded
from baton.keeping import keep
from baton.security.authority import LIFE_S, Authority, Token
from baton.security.errors import SecurityError
from baton.security.join_service import JoinService
from baton.security.names import Role
from baton.services import identities
from baton.services.config import REVEAL, Settings
from baton.services.ray.config import WORKER_ROLES
from baton.tasks import stop

# Lifetime of the tokens, with which parts also rejoin. They are revoked when the deployment ends, and expire
# if it is killed.
VALID_S = 3_600.0
EXTEND_S = 300.0

log = logging.getLogger(__name__)


class Trust:
    """A deployment's CA, which serves while the context is open. Does nothing with security.insecure."""

    def __init__(self, settings: Settings, host: str) -> None:
        """Become an operator, and with TLS open or create the CA of `settings`. Raises SecurityError.

        The CA will listen on a free port of `host`.
        """
        self._plain = settings.security.model_dump(mode="json", context=REVEAL)
        self._service: JoinService | None = None
        self._given: dict[Role, Token] = {}
        self._extending: asyncio.Task[None] | None = None
        if settings.security.tls:
            topic, authority = (
                settings.deployment,
                Authority.at(expanded(settings.security.ca, "security.ca")),
            )
            self._tokens = authority.tokens
            self._service = JoinService(authority, topic, addresses.join(host, 0))
            for role in (Role.SCHEDULER, Role.ROUTER, Role.WORKER, Role.OPERATOR):
                self._given[role] = authority.tokens.add(
                    role, topic, valid_s=VALID_S, uses=None, life_s=LIFE_S, pin=authority.pin
                )
        identities.take_on(settings, Role.OPERATOR)

    async def __aenter__(self) -> Self:
        if self._service:
            await self._service.__aenter__()
            self._extending = keep(self._extend, "validity of the parts' tokens")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._extending:
            await stop(self._extending)
        if self._service:
            await self._service.__aexit__(kind, error, trace)
        for token in self._given.values():
            self._tokens.revoke(token.id)

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(EXTEND_S)
            try:
                for token in self._given.values():
                    await asyncio.to_thread(self._tokens.extend, token.id, VALID_S)
            except SecurityError as error:  # such as a full disk; retried before they expire
                log.error("the parts' tokens could not be extended: %s", error)  # noqa: TRY400

    def section(self, part: str) -> dict[str, Any]:
        """Return the section `security` for a part: a role of workers, router, scheduler or operator."""
        if self._service is None:
            return self._plain
        role = Role.WORKER if part in WORKER_ROLES else Role(part)
        own = {"tls": True, "join": self._service.address, "token": str(self._given[role])}
        return own | {"plain_ranks": self._plain["plain_ranks"]}
