"""The installed command `baton`. Ctrl-C during its imports ends it without a traceback."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line (main.py), whose import takes a second on a busy machine."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # gRPC's C++ core would also print the errors that it raises. It reads this on import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from baton.services.cli.main import main as run

    run()
