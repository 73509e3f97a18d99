"""Compile the kernel for compute capability 9.0, which needs no GPU, and print its assembly.

    python tests/kernels/ngram_match/compile_for_h200.py TAIL

A process of its own: where kernels are interpreted there is nothing to compile.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton.kernels.ngram_match.gpu import _ngram_match_kernel

_POINTERS = {
    **dict.fromkeys(("tokens", "lengths", "limits", "counts"), "*i32"),
    **dict.fromkeys(("rows", "tails", "drafts", "workspace"), "*i64"),
}


def assembly(tail: int) -> str:
    """PTX of the kernel behind `tail` drafted tokens; `ptxas` has made machine code of it."""
    constants = {"K": 4, "K_POWER": 4, "TAIL": tail, "MIN_N": 2, "MAX_N": 16, "UNROLLED": 8, "HAS_ROWS": True}
    constants |= {"HAS_TAIL": tail > 0, "BLOCK": 1024}
    names = _ngram_match_kernel.arg_names
    source = ASTSource(
        fn=_ngram_match_kernel,
        signature={name: "constexpr" if name in constants else _POINTERS.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        # As at a launch with a context that is a multiple of 16 tokens.
        attrs={
            (names.index(name),): [["tt.divisibility", 16]] for name in ("tokens", "tokens_stride", "width")
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    text: str = compiled.asm["ptx"]
    return text


if __name__ == "__main__":
    print(assembly(int(sys.argv[1])))
