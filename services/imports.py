"""Imports that take seconds, done before a process serves or forks."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Sequence


def import_all(names: Sequence[str]) -> None:
    """Import modules, and exempt all that they create from garbage collection.

    The objects of vLLM's and torch's modules live as long as the process. Scanning them again and again would
    slow the import down, from 7.6 s to 8.8 s, and make forked processes copy every page that they share.
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
