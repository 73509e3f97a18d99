"""Ask the kernel for AMX tiles before vLLM chooses kernels that need them.

vLLM leaves that to oneDNN's first large product. A small bfloat16 model has no such product, and its engine
dies of SIGILL.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from baton.services.engine.patches.replace import replaces

logger = logging.getLogger(__name__)


@replaces("torch.cpu:_is_amx_tile_supported")
@functools.cache  # some models ask in every step; forked children keep what the kernel granted
def permitted(original: Callable[[], bool]) -> bool:
    import torch

    if not original():
        return False
    granted: bool = torch.cpu._init_amx()
    if not granted:
        logger.warning(
            "this CPU has AMX, but the kernel does not let this process use its AMX (Linux before 5.16, "
            "or a sandbox that refuses arch_prctl): slower kernels without it are used"
        )
    return granted
