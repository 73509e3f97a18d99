"""Stand in for `torchvision`, so that text models whose files import it run without it.

vLLM's Qwen3.5 imports Qwen3-VL's image and video processors even for a model without vision, and those import
torchvision. No CPU build of it fits this torch: the one that pip installs needs CUDA and breaks transformers.
So in vLLM's processes, unless a real torchvision is installed, its modules can be imported and are empty.
transformers still finds no torchvision, because it remembers its first answer, and its image processors work
without it. A stand-in package in site-packages would make it choose processors that fail.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "torchvision",
    "torchvision.io",
    "torchvision.ops",
    "torchvision.ops.boxes",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
}


def install() -> None:
    """Make `import torchvision...` succeed in this process if it would fail; a second call does nothing."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # caches that it is missing
    sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds and loads empty modules, for names that no other finder knows."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(fullname, self, is_package=True) if fullname in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> Any:
            raise AttributeError(f"{module.__name__}.{name}: torchvision is not installed, so no images here")

        module.__getattr__ = missing  # type: ignore[method-assign]
