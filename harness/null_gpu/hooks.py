"""Sets up each Python process of the null GPU's environment, from a .pth file there.

It loads the null GPU's driver and NVML, which others ask for by name alone, and changes a module when that is
first imported: tokens.py, entered.py.
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

# By module: the function that is called with it when it has been executed.
CHANGES = {
    "vllm.v1.worker.gpu.model_runner": "tokens:on_v2",
    "vllm.v1.worker.gpu_model_runner": "tokens:on_v1",
    "baton.services.engine.patches.replace": "entered:count",
}
HOME = Path(sys.prefix)


def start() -> None:
    """Set this process up."""
    libraries = folder(_packages())
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
    for name, value in environment(libraries).items():
        os.environ.setdefault(name, value)
    sys.meta_path.insert(0, _Finder)


def environment(libraries: Path) -> dict[str, str]:
    """Return the variables of all its processes."""
    return {
        "TRITON_LIBCUDA_PATH": str(libraries),
        "TRITON_CACHE_DIR": str(HOME / "cache" / "triton"),
        "VLLM_CACHE_ROOT": str(HOME / "cache" / "vllm"),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer is not there
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "UCX_MODULES": "^cuda",  # of NIXL's: it rewrites functions of the driver in place
    }


def _packages() -> Path:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return HOME / "lib" / version / "site-packages"


class _Finder:
    """Finds the modules of CHANGES as Python does, and has them changed when they have been executed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, _target: ModuleType | None = None) -> Any:
        """Return the module's specification; None for any other module."""
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
