"""The names in a certificate: a SPIFFE id, and a host name with the same parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from baton.security.errors import IdentityError

_DOMAIN = "spiffe://baton/"
_WORD = re.compile(r"[A-Za-z0-9._-]{1,200}")  # characters that SPIFFE allows in a path segment


class Role(StrEnum):
    """A process's role in access control. All workers have the same role, whatever they run."""

    WORKER = "worker"
    ROUTER = "router"
    SCHEDULER = "scheduler"
    OPERATOR = "operator"
    CA = "ca"  # the service that issues certificates

    @property
    def one(self) -> str:
        return f"an {self}" if self is Role.OPERATOR else f"a {self}"


@dataclass(frozen=True)
class Name:
    """A process's identity: topic, role, and a worker's id."""

    topic: str
    role: Role
    worker_id: str = ""

    def __post_init__(self) -> None:
        """Raise IdentityError for a name that cannot be in a certificate."""
        parts = [self.topic, self.worker_id] if self.role is Role.WORKER else [self.topic]
        for part in parts:
            if not _WORD.fullmatch(part) or part in (".", ".."):
                raise IdentityError(
                    f"{part!r} cannot be in a certificate's name: topics and worker ids are up to 200 "
                    "letters, digits, dots, dashes and underscores"
                )
        if self.worker_id and self.role is not Role.WORKER:
            raise IdentityError(f"{self.role.one} has no worker id")

    @property
    def uri(self) -> str:
        """The SPIFFE id: spiffe://baton/TOPIC/ROLE, plus /ID for workers."""
        return f"{_DOMAIN}{self.topic}/{self.role}{'/' if self.worker_id else ''}{self.worker_id}"

    @property
    def host(self) -> str:
        """The host name by which callers verify the role, because certificates contain no addresses."""
        return host_of(self.topic, self.role)

    @classmethod
    def parse(cls, uri: str) -> Name:
        """Parse a SPIFFE id. Raises IdentityError."""
        topic, _, rest = uri.removeprefix(_DOMAIN).partition("/")
        role, _, worker_id = rest.partition("/")
        if not uri.startswith(_DOMAIN) or role not in list(Role):
            raise IdentityError(f"{uri!r} is not one of Baton's names")
        return cls(topic, Role(role), worker_id)

    def __str__(self) -> str:
        return f"{self.role} {self.worker_id}".rstrip()


def host_of(topic: str, role: Role) -> str:
    return f"{role}.{topic}.baton"
