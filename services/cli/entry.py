"""The installed command `baton`. Ctrl-C during its imports ends it without a traceback."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line (main.py), whose import takes a second on a busy machine."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # gRPC's C++ core prints its own lines beside the errors that it raises. Read when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from baton.services.cli.main import main as run

    run()
