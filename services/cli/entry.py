"""The command `baton`, as it is installed: Ctrl-C while it is being imported ends it without a traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line (services/cli/main.py), whose import takes a second on a busy machine."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from baton.services.cli.main import main as run

    run()
