"""Tokens for joining a deployment: `ID.SECRET.PIN` in one line of text.

The joiner authenticates its request with an HMAC, so the secret is never sent. The pin is the SHA-256 of the
CA's public key, by which the joiner verifies the CA (as in kubeadm).
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.security.errors import JoinRefused, TokenError
from baton.security.identity import kept_json
from baton.security.names import Name, Role

KEPT_S = 7 * 86_400  # s for which expired tokens are kept
_ID = re.compile(r"[0-9a-f]{12}")
_TEXT = re.compile(r"([0-9a-f]{12})\.([0-9a-f]{32})\.([0-9a-f]{64})")


@dataclass(frozen=True)
class Token:
    """A token as its joiner gets it."""

    id: str
    secret: str
    pin: str

    @classmethod
    def parse(cls, text: str) -> Token:
        """Parse a token. Raises TokenError, without the text."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise TokenError("not a token: it is ID.SECRET.PIN in one line, as `baton ca token` prints it")
        return cls(*found.groups())

    def mac(self, name: Name, request: bytes) -> str:
        """Return the HMAC of a request, in hex."""
        return _mac(self.id, self.secret, name, request)

    def __str__(self) -> str:
        return f"{self.id}.{self.secret}.{self.pin}"


@dataclass
class Grant:
    """The CA's record of a token."""

    secret: str
    role: str
    topic: str
    expires_at: float  # wall clock, seconds
    uses: int | None  # left; None: any number
    life_s: float  # lifetime of the certificates


class TokenStore:
    """The CA's tokens, in a file that `baton ca token` and `baton ca serve` share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(
        self, role: Role, topic: str, *, valid_s: float, uses: int | None, life_s: float, pin: str
    ) -> Token:
        """Create a token for processes with this role and topic. Raises AuthorityError."""
        token = Token(secrets.token_hex(6), secrets.token_hex(16), pin)
        with self._open() as grants:
            grants[token.id] = Grant(token.secret, role.value, topic, time.time() + valid_s, uses, life_s)
        return token

    def use(self, token_id: str, name: Name, request: bytes, mac: str) -> float:
        """Use a token once; return the lifetime of the certificate to issue, in seconds.

        A caller without the secret learns nothing about the token. Raises JoinRefused, AuthorityError.
        """
        with self._open() as grants:
            grant = grants.get(token_id)
            proof = _mac(token_id, grant.secret if grant else "", name, request)
            if not hmac.compare_digest(proof.encode(), mac.encode()) or grant is None:
                raise JoinRefused(f"token {token_id}: this CA does not know it, or the secret is wrong")
            if grant.expires_at <= time.time():
                raise JoinRefused(f"token {token_id} has expired: make another with `baton ca token`")
            if (grant.role, grant.topic) != (name.role, name.topic):
                raise JoinRefused(
                    f"token {token_id} is for {Role(grant.role).one} of topic {grant.topic!r}, not for "
                    f"{name.role.one} of topic {name.topic!r}"
                )
            if grant.uses == 0:
                raise JoinRefused(
                    f"token {token_id} has no uses left: make another with `baton ca token --uses`"
                )
            if grant.uses is not None:
                grant.uses -= 1
            return grant.life_s

    def extend(self, token_id: str, valid_s: float) -> None:
        """Let a token, if it is known, expire this long from now. Raises AuthorityError."""
        with self._open() as grants:
            if token_id in grants:
                grants[token_id].expires_at = time.time() + valid_s

    def revoke(self, token_id: str) -> bool:
        """Delete a token; return False for an unknown one. Raises AuthorityError."""
        with self._open() as grants:
            return grants.pop(token_id, None) is not None

    def all(self) -> dict[str, Grant]:
        """Return the tokens by id. Raises AuthorityError."""
        with self._open() as grants:
            return dict(grants)

    @contextlib.contextmanager
    def _open(self) -> Iterator[dict[str, Grant]]:
        with kept_json(self._path, "tokens", lambda values: Grant(**values)) as grants:
            for key in [key for key, one in grants.items() if one.expires_at <= time.time() - KEPT_S]:
                del grants[key]
            yield grants


def is_token_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def _mac(token_id: str, secret: str, name: Name, request: bytes) -> str:
    said = b"\n".join((token_id.encode(), name.uri.encode(), request))
    return hmac.digest(secret.encode(), said, "sha256").hex()
