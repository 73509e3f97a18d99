"""API keys and passwords: from the configuration, from files, from vLLM's environment variable.

Files are read by the process that needs what is in them, when it starts: a worker's host need not have them.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from baton.services.config import RouterSettings, SchedulerSettings, Settings
from baton.services.errors import ConfigError

ENV_VLLM_KEY = "VLLM_API_KEY"  # what guards stock vLLM guards us: nobody shall find the door open by surprise

log = logging.getLogger(__name__)


def api_keys(router: RouterSettings) -> list[str]:
    """All that open the router, in their file's order; none where it is open. Raises ConfigError."""
    if router.api_key:
        return [router.api_key.get_secret_value()]
    if router.api_key_file:
        return keys_in("router.api_key_file", router.api_key_file)
    stock = os.environ.get(ENV_VLLM_KEY)
    return [stock] if stock else []


def guarded(router: RouterSettings) -> bool:
    """Whether a key is needed."""
    return bool(router.api_key or router.api_key_file or os.environ.get(ENV_VLLM_KEY))


def keys_in(key: str, path: str) -> list[str]:
    """One a line; blank lines and comments (#) are none. `key` names the setting. Raises ConfigError."""
    found = []
    for number, line in enumerate(_read(key, path).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 1:
            raise ConfigError(
                f"{key}: line {number} of {path!r} has a blank in it: one key a line, comments on their own"
            )
        found += words
    if not found:
        raise ConfigError(f"{key}: {path!r} holds no key: write one a line")
    return found


def store_password(scheduler: SchedulerSettings) -> str:
    """The one in the file; empty where it is in the URL, or there is none. Raises ConfigError."""
    path = scheduler.store_password_file
    if not path:
        return ""
    lines = _read("scheduler.store_password_file", path).splitlines()
    if len(lines) != 1 or not lines[0]:
        raise ConfigError(f"scheduler.store_password_file: {path!r} must hold the password, in one line")
    return lines[0]


def check(settings: Settings) -> None:
    """Before anything starts: raises ConfigError for a file that its process could not use."""
    api_keys(settings.router)
    store_password(settings.scheduler)


def _read(key: str, path: str) -> str:
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig") as file:
            readable_by_all = os.fstat(file.fileno()).st_mode & stat.S_IROTH
            text = file.read()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path!r} is not a text file in UTF-8") from None
    if readable_by_all:
        log.warning("%s: everybody on this machine can read %s; chmod o-r takes that away", key, path)
    return text
