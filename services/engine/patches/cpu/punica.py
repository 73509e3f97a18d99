"""Have services/engine/cpu_lora.py apply adapters: it leaves tokens without an adapter alone.

Leans on: vllm.platforms.cpu.CpuPlatform.get_punica_wrapper, which names the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.platforms.cpu import CpuPlatform

    replace(CpuPlatform, "get_punica_wrapper", grouped, ("cls",))


def grouped(shipped: Callable[..., str]) -> Callable[..., str]:
    """Return a method that names our class."""
    del shipped

    def get_punica_wrapper(cls: Any) -> str:
        del cls
        return "baton.services.engine.cpu_lora.GroupedPunica"

    return get_punica_wrapper
