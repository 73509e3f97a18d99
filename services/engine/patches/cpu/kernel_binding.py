"""Replace Triton's kernels by the CPU's only in modules that have any: vLLM's and ours.

Leans on: vllm.triton_utils.dispatcher._rebind_kernels, which looks through the `sys.modules` of its module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from baton.services.engine.patches.replace import replace

_HOLD_KERNELS = ("vllm", "baton")  # packages whose modules may have vLLM's Triton kernels as attributes


def install() -> None:
    from vllm.triton_utils import dispatcher

    replace(dispatcher, "_rebind_kernels", among_holders, ("overrides",))


def among_holders(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that shows vLLM only the modules of `_HOLD_KERNELS`."""
    from vllm.triton_utils import dispatcher

    def rebind_kernels(overrides: Any) -> None:
        holders = {name: one for name, one in sys.modules.items() if name.partition(".")[0] in _HOLD_KERNELS}
        dispatcher.sys = SimpleNamespace(modules=holders)
        try:
            shipped(overrides)
        finally:
            dispatcher.sys = sys

    return rebind_kernels
