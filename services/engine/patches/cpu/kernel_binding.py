"""Replace Triton kernels with CPU kernels only in the modules that have any: vLLM's and ours.

vLLM searches all of `sys.modules`, which takes 0.3 s and fails on llvmlite, so no engine starts if numba was
imported first.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from baton.services.engine.patches.replace import replaces

_PACKAGES = ("vllm", "baton")  # whose modules may have vLLM's Triton kernels as attributes


@replaces("vllm.triton_utils.dispatcher:_rebind_kernels")
def _rebind(original: Any, overrides: Any) -> None:
    from vllm.triton_utils import dispatcher

    modules = {name: one for name, one in sys.modules.items() if name.partition(".")[0] in _PACKAGES}
    dispatcher.sys = SimpleNamespace(modules=modules)
    try:
        original(overrides)
    finally:
        dispatcher.sys = sys
