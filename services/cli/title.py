"""Hide the secrets of a command line from `ps`.

Everybody on a machine can read the arguments of its processes, and forked processes inherit them. They are
visible until `hide_secrets` runs, so a secret that must never be seen belongs in a file or in the
environment.
"""

from __future__ import annotations

from collections.abc import Iterable

import setproctitle

from baton.services.cli.flags import secret_flags

HIDDEN = "***"


def hide_secrets(arguments: Iterable[str]) -> None:
    """Set this process's title to its command line, with asterisks in place of secret values."""
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
