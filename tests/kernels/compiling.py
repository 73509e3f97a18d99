"""Triton kernels compiled to machine code for a GPU that is not there: what the interpreter lets pass, and a
compiler does not, shows without one.

Triton brings its own assembler. A process that interprets cannot compile, so tests run this in another.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_ALIGNED = [["tt.divisibility", 16]]


def compile_launches(module: ModuleType, names: list[str], call: Callable[[], object]) -> dict[str, int]:
    """Call what launches kernels, these names of a module; instead of being launched they are compiled.

    Gives how many variants of each. Raises Triton's CompilationError.
    """
    seen: dict[tuple[Any, ...], Any] = {}
    kernels = {name: getattr(module, name) for name in names}
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _Launcher(kernel, seen))
        call()
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return {name: sum(key[0] == name for key in seen) for name in names}


class _Launcher:
    """Takes a launch and compiles the variant that it asks for, as Triton would specialise it."""

    def __init__(self, kernel: Any, seen: dict[tuple[Any, ...], Any]) -> None:
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._compile

    def _compile(self, *args: Any, num_warps: int = 4, **kwargs: Any) -> None:
        given = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for index, (name, parameter) in enumerate(
            zip(self._kernel.arg_names, self._kernel.params, strict=True)
        ):
            value = given[name]
            special = isinstance(value, int) and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (special and value == 1):
                signature[name], constants[(index,)] = "constexpr", value
                continue
            signature[name] = f"*{_TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"
            if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
                attributes[(index,)] = _ALIGNED
        key = self._kernel.__name__, *signature.values(), *(str(one) for one in constants.values())
        if key not in self._seen:
            source = ASTSource(fn=self._kernel, signature=signature, constexprs=constants, attrs=attributes)
            self._seen[key] = triton.compile(source, target=HOPPER, options={"num_warps": num_warps})
