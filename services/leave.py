"""How a process with an engine's libraries in it ends."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End this process at once; all must be said and released before.

    The interpreter's own end takes 1.5 s more for torch's and vLLM's objects, waits for a thread that may
    still load a model, and prints what extension modules leaked.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
