"""API keys, tenants and their limits, and the book: the record of all of them in a deployment.

The book has only the SHA-256 of each secret. A secret is 256 random bits, so it needs no slow password hash,
which would cost time in every request.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from baton.services.config import suggest
from baton.services.errors import ServiceError, one_line

SECRET_PREFIX = "baton-"  # noqa: S105 (tells people and scanners what a leaked key is for)
MAX_PRIORITY = 100

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
ClassName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
Count = Annotated[int, Field(ge=1, le=10**12, strict=True)]


class BookError(ServiceError):
    """The key book cannot be read or changed. The message says where the book is."""


class OverLimit(ServiceError):
    """A request exceeds a limit. `retry_after_s` is 0 if a retry would not help."""

    def __init__(self, message: str, limit: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.limit = limit  # the limit's name in the book
        self.retry_after_s = retry_after_s


class Limits(BaseModel):
    """The limits of one key, or of all of a tenant's keys together; None: no limit.

    A key may use a class only if its tenant may, too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    requests_per_s: Count | None = Field(None, description="Most requests a second.")
    tokens_per_min: Count | None = Field(
        None, description="Most tokens a minute, of prompts and answers together."
    )
    concurrency: Count | None = Field(None, description="Most requests at a time.")
    default_class: ClassName | None = Field(None, description="Class of requests that choose none.")
    classes: list[ClassName] | None = Field(None, min_length=1, description="Classes that may be chosen.")

    @model_validator(mode="after")
    def _default_may_be_used(self) -> Self:
        if self.default_class and self.classes and self.default_class not in self.classes:
            raise ValueError(f"default_class {self.default_class!r} is not one of classes {self.classes}")
        return self


class Tenant(Limits):
    """A tenant: its limits, its turns when requests wait, and whether it has its own prefix cache."""

    priority: Annotated[int, Field(ge=1, le=MAX_PRIORITY, strict=True)] = Field(
        1, description="Turns that it gets where a tenant of priority 1 gets one."
    )
    cache_salt: Annotated[bool, Field(strict=True)] = Field(
        True, description="Whether its prefix cache is its own."
    )


class ApiKey(Limits):
    """A key: its tenant, the SHA-256 of its secret, and its own limits within the tenant's."""

    tenant: Name
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class Caller:
    """The key and tenant of a request, with the limits of both."""

    key: str  # the key's name
    tenant: str  # the tenant's name; "" if keys have no tenants
    key_limits: Limits
    settings: Tenant

    @property
    def default_class(self) -> str:
        """The class of requests that ask for none; "": the first that the caller may use."""
        return self.key_limits.default_class or self.settings.default_class or ""

    def may_use(self, name: str) -> bool:
        return all(one.classes is None or name in one.classes for one in (self.key_limits, self.settings))


L = TypeVar("L", bound=Limits)
ANYBODY = Caller("", "", Limits(), Tenant())  # the caller if there are no tenants or no keys


class Book(BaseModel):
    """All keys and tenants of a deployment, by name. A tenant that is not listed has no limits."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    tenants: dict[Name, Tenant] = Field(default_factory=dict)
    keys: dict[Name, ApiKey] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_key_a_secret(self) -> Book:
        owner: dict[str, str] = {}
        for name, key in self.keys.items():
            if owner.setdefault(key.sha256, name) != name:
                raise ValueError(f"keys {owner[key.sha256]!r} and {name!r} have the same sha256")
        return self

    def tenant(self, name: str) -> Tenant:
        return self.tenants.get(name, ANYBODY.settings)

    def callers(self) -> dict[bytes, Caller]:
        return {
            bytes.fromhex(key.sha256): Caller(name, key.tenant, key, self.tenant(key.tenant))
            for name, key in self.keys.items()
        }

    def with_key(self, name: str, key: ApiKey) -> Book:
        """Return the book with a key added. Raises BookError if the name is taken."""
        if name in self.keys:
            raise BookError(f"there is a key {name!r} already; remove it first, or choose another name")
        return book_of({**self._plain(), "keys": {**self.keys, name: key}})

    def without_key(self, name: str) -> Book:
        """Return the book without a key. Raises BookError if there is no such key."""
        if name not in self.keys:
            close = difflib.get_close_matches(name, self.keys, n=1)
            raise BookError(f"there is no key {name!r}{f'; did you mean {close[0]!r}?' if close else ''}")
        return book_of({**self._plain(), "keys": {one: k for one, k in self.keys.items() if one != name}})

    def with_tenant(self, name: str, tenant: Tenant) -> Book:
        return book_of({**self._plain(), "tenants": {**self.tenants, name: tenant}})

    def _plain(self) -> dict[str, Any]:
        return {"tenants": self.tenants, "keys": self.keys}


def book_of(content: Any) -> Book:
    """Return the book with this content. Raises BookError."""
    try:
        return Book.model_validate(content)
    except ValidationError as error:
        raise BookError(f"{one_line(error)}{_nearest(error)}") from None


def checked(kind: type[L], **values: Any) -> L:
    """Return a `kind` (key or tenant) with these values. Raises BookError."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise BookError(one_line(error)) from None


def new_secret() -> str:
    return SECRET_PREFIX + secrets.token_urlsafe(32)


def digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def salted(caller: Caller, own: str | None) -> str | None:
    """Return the cache salt of a request: its tenant's, combined with the client's own.

    A client cannot forge another tenant's salt, because its own is hashed together with its tenant's name
    ("" for a tenant that shares the cache).
    """
    mine = caller.tenant if caller.settings.cache_salt else ""
    if not caller.tenant or not (mine or own):
        return own
    return hmac.new(mine.encode(), (own or "").encode(), hashlib.sha256).hexdigest()


def _nearest(error: ValidationError) -> str:
    for one in error.errors(include_input=False, include_context=False, include_url=False):
        if one["type"] == "extra_forbidden":
            kinds: dict[Any, type[BaseModel]] = {"tenants": Tenant, "keys": ApiKey}
            known = kinds[one["loc"][0]] if len(one["loc"]) > 1 else Book
            return suggest(str(one["loc"][-1]), list(known.model_fields))
    return ""
