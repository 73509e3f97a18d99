"""Ask the kernel for AMX's tiles before vLLM chooses kernels that use them.

Leans on: torch.cpu._init_amx, and torch.cpu._is_amx_tile_supported, which vLLM asks by this name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace

logger = logging.getLogger(__name__)


def install() -> None:
    import torch

    replace(torch.cpu, "_is_amx_tile_supported", permitted, ())


def permitted(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that says whether the CPU has AMX and the kernel lets this process use it."""

    @functools.cache  # asked at every step of some models; forked children keep what the kernel granted
    def _is_amx_tile_supported() -> bool:
        import torch

        if not shipped():
            return False
        granted: bool = torch.cpu._init_amx()
        if not granted:
            logger.warning(
                "this CPU has AMX, but the kernel does not let this process use its AMX (Linux before 5.16, "
                "or a sandbox that refuses arch_prctl): slower kernels without it are used"
            )
        return granted

    return _is_amx_tile_supported
