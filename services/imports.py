"""Import slow modules before a process serves or forks, and tune garbage collection."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Sequence

# Arguments of gc.set_threshold. With the default of 700, 64 streams trigger a collection every few tokens,
# and a scan of all live objects several times a minute.
_GC_THRESHOLDS = (50_000, 20, 50)


def import_all(names: Sequence[str]) -> None:
    """Import modules, and exempt the objects that they create from garbage collection.

    vLLM's and torch's objects live as long as the process. Scanning them would slow the import from 7.6 s to
    8.8 s, and make forked processes copy the pages that they share.
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
    """Exempt existing objects from garbage collection, and collect new ones less often.

    Without this, a scheduler on a busy machine paused for 40-220 ms every 7 s at 160 placements per second.
    """
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
