"""What `ps` shows of our processes: their names, and no secret of the command line.

Everybody on a machine can read the arguments of all of its processes; forked ones carry their parent's.
Until the interpreter has come as far as `hide_secrets`, a moment after the start, they are there: a secret
that nobody may see at all belongs into a file or the environment.
"""

from __future__ import annotations

from collections.abc import Iterable

import setproctitle

from baton.services.cli.flags import secret_flags

HIDDEN = "***"


def name_process(name: str) -> None:
    """`baton decode-0` for the part of that name."""
    setproctitle.setproctitle(f"baton {name}")


def hide_secrets(arguments: Iterable[str]) -> None:
    """Be called as the command is, but for what is a secret of its `arguments`."""
    name_process(" ".join(_shown(arguments)))


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
