"""Keep the secrets of the configuration and the environment out of a bundle.

Settings in config.SECRET are masked, and their values are also replaced in every text of the archive, because
logs and reports of programs may contain them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from baton.errors import BatonError
from baton.redis_url import without_password
from baton.services import credentials
from baton.services.config import REVEAL, SECRET, Settings

HIDDEN = "***"
SHORTEST = 4  # shorter texts are part of too many words to be replaced, and no key is that short
_PLAIN = 8  # texts in engine.extra of at least this length count as secret
_NAMES = re.compile(
    r"key|token|secret|passw|credential|auth|header", re.IGNORECASE
)  # names of variables and keys


def masked(settings: Settings) -> dict[str, Any]:
    """Return the configuration without secrets; engine.extra keeps only its names."""
    tree: dict[str, Any] = settings.model_dump(mode="json")
    for section, key in SECRET:
        value = tree.get(section, {}).get(key)
        if isinstance(value, dict):
            tree[section][key] = dict.fromkeys(value, HIDDEN)
        elif isinstance(value, str) and "://" in value:
            tree[section][key] = without_password(value)
        elif value and value != "memory":
            tree[section][key] = HIDDEN
    return tree


class Hider:
    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for one in secrets if len(one) >= SHORTEST for form in _forms(one)}
        # Longest first, as one may be the beginning of another.
        self._pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))) or r"(?!)")

    @classmethod
    def of(cls, settings: Settings, environment: Mapping[str, str] = os.environ) -> Hider:
        """Return a Hider for the secrets in the settings, in files they name, and in the environment."""
        return cls([*_configured(settings), *_in_files(settings), *_in_environment(environment)])

    def hide(self, text: str) -> str:
        return self._pattern.sub(HIDDEN, text)


def _forms(secret: str) -> set[str]:
    return {secret, quote(secret, safe=""), quote(secret), unquote(secret), json.dumps(secret)[1:-1]}


def _configured(settings: Settings) -> Iterator[str]:
    tree: dict[str, Any] = settings.model_dump(mode="json", context=REVEAL)
    for section, key in SECRET:
        value = tree[section][key]
        if (section, key) == ("engine", "extra"):
            yield from _of_mapping(value)
        elif (section, key) == ("tracing", "headers"):
            for header in value.values():
                yield from (header, header.partition(" ")[2])  # the part after the scheme, as in Bearer KEY
        elif isinstance(value, str) and "://" in value:
            yield from _of_url(value)
        elif isinstance(value, str) and value != "memory":
            yield value
            yield from value.split(".")  # a token's parts: its id, its secret, the CA's pin


def _of_mapping(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _of_mapping(value)
        elif isinstance(value, str) and (_NAMES.search(name) or len(value) >= _PLAIN):
            yield value


def _of_url(url: str) -> Iterator[str]:
    user, _, place = url.partition("://")[2].rpartition("@")
    yield user.partition(":")[2]
    for option in place.partition("?")[2].split("&"):
        name, _, value = option.partition("=")
        if _NAMES.search(name):
            yield value


def _in_files(settings: Settings) -> Iterator[str]:
    with contextlib.suppress(BatonError):
        yield from credentials.api_keys(settings.router)
    with contextlib.suppress(BatonError):
        yield credentials.page_key(settings.ops)
    with contextlib.suppress(BatonError):
        yield credentials.store_password(settings.scheduler)
    with contextlib.suppress(BatonError):
        yield credentials.keys_store_password(settings.router)
    with contextlib.suppress(BatonError):
        token = credentials.token(settings.security).strip()
        yield from (token, *token.split("."))


def _in_environment(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if _NAMES.search(name) and not value.startswith("/"):  # a path is not a secret
            yield value
        elif "://" in value:
            yield from _of_url(value)
