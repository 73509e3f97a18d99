"""Set up each Python process of the null GPU's environment; a .pth file there calls `start`.

It loads the null GPU's driver and NVML, so that libraries find them by name, and patches modules when they
are first imported (tokens.py, entered.py).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.null_gpu.libraries import folder

# Module -> the function that patches it after its execution.
CHANGES = {
    "vllm.v1.worker.gpu.model_runner": "tokens:on_v2",
    "vllm.v1.worker.gpu_model_runner": "tokens:on_v1",
    "baton.services.engine.patches.replace": "entered:count",
}
HOME = Path(sys.prefix)


def start() -> None:
    libraries = folder(_packages())
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
    for name, value in environment(libraries).items():
        os.environ.setdefault(name, value)
    sys.meta_path.insert(0, _Finder)


def environment(libraries: Path) -> dict[str, str]:
    """Return the environment variables of the null GPU's processes."""
    return {
        "TRITON_LIBCUDA_PATH": str(libraries),
        "TRITON_CACHE_DIR": str(HOME / "cache" / "triton"),
        "VLLM_CACHE_ROOT": str(HOME / "cache" / "vllm"),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer is not installed
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "UCX_MODULES": "^cuda",  # this module of NIXL's UCX rewrites functions of the driver in place
    }


def _packages() -> Path:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return HOME / "lib" / version / "site-packages"


class _Finder:
    """Finds the modules of CHANGES as Python does and patches them after their execution."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, _target: ModuleType | None = None) -> Any:
        change = CHANGES.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if change else None
        if spec is None or spec.loader is None or change is None:
            return None
        module, _, function = change.partition(":")
        spec.loader.exec_module = _changing(spec.loader.exec_module, module, function)  # type: ignore
        return spec


def _changing(
    execute: Callable[[ModuleType], None], module: str, function: str
) -> Callable[[ModuleType], None]:
    def exec_module(made: ModuleType) -> None:
        execute(made)
        getattr(importlib.import_module(f"harness.null_gpu.{module}"), function)(made)

    return exec_module
