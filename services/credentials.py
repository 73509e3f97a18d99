"""Read API keys and passwords from the configuration, from files and from vLLM's environment variable.

Each process reads only the files it needs, at start, so a worker's host needs no router keys.
"""

from __future__ import annotations

import logging
import os
import stat

from baton.home import expanded
from baton.redis_url import password_file
from baton.security.exposure import only_from_here
from baton.services.config import OpsSettings, RouterSettings, SchedulerSettings, SecuritySettings, Settings
from baton.services.errors import ConfigError
from baton.services.tenants.file_book import FileBook
from baton.services.tenants.model import BookError

FILE = "file:"  # begins a secret's value that names a file
ENV_VLLM_KEY = "VLLM_API_KEY"  # also honoured here, so that replacing vLLM with Baton does not open the API

log = logging.getLogger(__name__)


def api_keys(router: RouterSettings) -> list[str]:
    """Return the keys that the router accepts, in file order; none if it needs no key.

    Raises ConfigError.
    """
    if router.api_key:
        return keys_of("router.api_key", router.api_key.get_secret_value())
    stock = os.environ.get(ENV_VLLM_KEY)
    return [stock] if stock else []


def guarded(router: RouterSettings) -> bool:
    stock = os.environ.get(ENV_VLLM_KEY)
    return bool(router.api_key or router.has_tenants or stock)


def open_to_all(router: RouterSettings, host: str = "") -> str:
    """Return a warning if other machines can reach the router (at `host`) without a key, else ""."""
    host = host or router.host
    if guarded(router) or only_from_here(host):
        return ""
    return (
        f"no key is needed, and {host} can be reached from other machines: anyone who reaches it can use the "
        "router. Set router.api_key or router.keys_file, or put a proxy that checks keys in front "
        "(docs/tenants.md)"
    )


def keys_of(key: str, value: str) -> list[str]:
    """Return the key in a setting's value, or those in the file that it names. Raises ConfigError."""
    path = _path(key, value)
    return keys_in(key, path) if path else [value]


def keys_in(key: str, path: str) -> list[str]:
    """Return the keys in a file, one per line, without blank lines and comments (#).

    `key` names the setting in messages. Raises ConfigError.
    """
    found = []
    for number, line in enumerate(_read(key, path).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 1:
            raise ConfigError(
                f"{key}: line {number} of {path!r} contains a space: write one key per line, no comment"
            )
        found += words
    if not found:
        raise ConfigError(f"{key}: {path!r} contains no key: write one per line")
    return found


def store_password(scheduler: SchedulerSettings) -> str:
    """Return the store's password from its file, or "", as it may be in the URL. Raises ConfigError."""
    return _password("scheduler.store", scheduler.store)


def keys_store_password(router: RouterSettings) -> str:
    """Return the password of the Redis with keys and limits from its file, or "". Raises ConfigError."""
    return _password("router.keys_store", router.keys_store)


def page_key(ops: OpsSettings) -> str:
    """Return the key of the live page, or "". Raises ConfigError."""
    keys = keys_of("ops.key", ops.key.get_secret_value()) if ops.key else [""]
    if len(keys) != 1:
        raise ConfigError("ops.key: the file must hold one key, on one line")
    return keys[0]


def token(security: SecuritySettings) -> str:
    """Return the token for joining. Raises ConfigError."""
    value = security.token.get_secret_value() if security.token else ""
    if not value:
        raise ConfigError(
            "security.token: to join, a process needs a token from `baton ca token`, as file:PATH"
        )
    path = _path("security.token", value)
    return _read("security.token", path) if path else value


def check(settings: Settings) -> None:
    """Raise ConfigError if a file with keys or passwords cannot be used."""
    api_keys(settings.router)
    page_key(settings.ops)
    if settings.router.keys_file:
        check_book(settings.router.keys_file)
    store_password(settings.scheduler)
    keys_store_password(settings.router)


def check_book(path: str) -> None:
    """Raise ConfigError if a router could not use this file of keys and tenants."""
    try:
        FileBook(path).read()
    except BookError as error:
        raise ConfigError(str(error)) from None


def _path(key: str, value: str) -> str:
    """Return PATH of a secret given as file:PATH, or "". Raises ConfigError."""
    if value == FILE:
        raise ConfigError(f"{key}: write a path after {FILE}")
    return value.removeprefix(FILE) if value.startswith(FILE) else ""


def _password(key: str, url: str) -> str:
    path = password_file(url)
    if not path:
        return ""
    lines = _read(key, path).splitlines()
    if len(lines) != 1 or not lines[0]:
        raise ConfigError(f"{key}: {path!r} must hold the password, on one line")
    return lines[0]


def _read(key: str, path: str) -> str:
    try:
        with expanded(path, key).open(encoding="utf-8-sig") as file:
            readable_by_all = os.fstat(file.fileno()).st_mode & stat.S_IROTH
            text = file.read()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path!r} is not a text file in UTF-8") from None
    if readable_by_all:
        log.warning("%s: every user of this machine can read %s; chmod o-r prevents that", key, path)
    return text
