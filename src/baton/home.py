"""Expand ~ in paths. A user in a container may have no home folder: no HOME, and a uid without a name."""

from __future__ import annotations

import os
from pathlib import Path

from baton.errors import BatonError


class NoHome(BatonError):
    """A path begins with ~ although the user has no home folder."""


def expanded(path: str, key: str) -> Path:
    """Return a path with ~ replaced by the home folder. `key`: the path's setting. Raises NoHome."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise NoHome(
            f"{key}: {path!r} needs a home folder, and this user ({os.getuid()}) has none: set HOME, or "
            "give the whole path"
        ) from None
