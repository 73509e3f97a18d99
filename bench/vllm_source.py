"""Load functions from vLLM's Python files without importing vLLM.

Its Triton kernels need only torch and triton, but the modules that define them need all of vLLM. The files
are looked up in an installed vLLM or in a folder `vllm` next to `bench` (docs/kernels.md lists them).
"""

from __future__ import annotations

import ast
import atexit
import importlib.util
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_TRITON = ("import torch", "import triton", "import triton.language as tl")


def load(
    name: str, paths: Sequence[str], prelude: Sequence[str] = (), only: Sequence[str] = ()
) -> ModuleType | None:
    """Return a module `name` with the definitions of these files; None if one is not found.

    `prelude`, lines of Python, replaces their imports from vllm. `only` names the functions to load, by
    default all.
    """
    made = ["from __future__ import annotations", *_TRITON, *prelude]
    for path in paths:
        file = find(path)
        if file is None:
            return None
        text = file.read_text()
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if _wanted(node, only):
                first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
                made += ["", "", *lines[first - 1 : node.end_lineno]]
    # Triton reads a kernel's source later, so keep the file until the process ends.
    folder = tempfile.mkdtemp(prefix="baton-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = Path(folder, f"{name}.py")
    file.write_text("\n".join(made) + "\n")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find(path: str) -> Path | None:
    """Return the file at this path of vLLM's package; None if there is none."""
    package = importlib.util.find_spec("vllm")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    return next((file for folder in folders if (file := Path(folder, path)).is_file()), None)


def _wanted(node: ast.stmt, only: Sequence[str]) -> bool:
    if only:
        return isinstance(node, ast.FunctionDef) and node.name in only
    if isinstance(node, ast.ImportFrom):
        return node.module not in (None, "__future__") and not str(node.module).startswith("vllm")
    return not isinstance(node, ast.Import)
