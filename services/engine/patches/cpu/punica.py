"""Apply LoRA adapters with services/engine/cpu_lora.py.

vLLM applies the device's last adapter to tokens without one, if a batch has both, and gathers the matrices of
every token.
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.patches.replace import replaces


@replaces("vllm.platforms.cpu:CpuPlatform.get_punica_wrapper")
def _ours(original: Any, cls: Any) -> str:
    del original, cls
    return "baton.services.engine.cpu_lora.GroupedPunica"
