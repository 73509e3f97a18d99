"""The user's home folder and name. A container's user may have neither: no HOME, a number without a name."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from baton.errors import BatonError


class NoHome(BatonError):
    """A path begins with ~, and nothing says where that is."""


def expanded(path: str, key: str) -> Path:
    """Return a path with the home folder for its ~. `key` names its setting. Raises NoHome."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise NoHome(
            f"{key}: {path!r} is below a home folder, and this user ({os.getuid()}) has none: set HOME, or "
            "give the whole path"
        ) from None


def name_user() -> None:
    """Give a user without a name one in this process: torch asks for it when it is imported."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid-{os.getuid()}"
