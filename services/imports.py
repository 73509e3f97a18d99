"""Import what takes seconds before a process serves or forks, and control garbage collection from then on."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Sequence

# Young objects between two collections, and how many of those make one of older objects. The default of 700
# collects every few tokens of 64 streams, and scans all live objects several times a minute.
_GC_THRESHOLDS = (50_000, 20, 50)


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


def collect_seldom() -> None:
    """Exempt existing objects from garbage collection, and collect the rest seldom: before a process serves.

    A scheduler at 160 placements a second stood still for 40 to 220 ms every 7 s, on a busy machine.
    """
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
