"""The title under which `ps` shows a command: without the secrets of its command line.

Everybody on a machine can read the arguments of all its processes, and a forked process inherits those of its
parent. The arguments stay visible for a moment, until `hide_secrets` runs: a secret that must never be seen
belongs in a file or in the environment.
"""

from __future__ import annotations

from collections.abc import Iterable

import setproctitle

from baton.services.cli.flags import secret_flags

HIDDEN = "***"


def hide_secrets(arguments: Iterable[str]) -> None:
    """Give this process its command line as its title, with asterisks in place of secret values."""
    setproctitle.setproctitle(" ".join(["baton", *_shown(arguments)]))


def _shown(arguments: Iterable[str]) -> Iterable[str]:
    secret = secret_flags()
    hide_next = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if hide_next:
            yield HIDDEN
        elif equals and flag in secret:
            yield f"{flag}={HIDDEN}"
        else:
            yield argument
        hide_next = not hide_next and argument in secret
