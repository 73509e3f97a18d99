"""Imports that take seconds, before a process serves or forks."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Sequence


def import_all(names: Sequence[str]) -> None:
    """Import modules, out of the garbage collector's sight: while it is done, and ever after.

    It would look again and again through all that vLLM's and torch's modules leave, which lives as long as
    the process: importing takes 7.6 s, not 8.8. In forked processes it would touch, and so copy, every page
    that they share.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
