"""`python -m tests.kernels.ngram_match.compile_all`: compile ngram_match's kernel for Hopper.

It asserts that texts are read 16 bytes per thread, and that no array is kept on a stack.
"""

import torch

from baton.kernels.ngram_match import gpu, new_workspace
from tests.kernels.compiling import compile_launches, report

KERNELS = ["_ngram_match_kernel"]


def launch(tail):
    tokens, numbers = torch.zeros(4, 1024, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    rows, drafts = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)
    tails = torch.zeros(2, tail, dtype=torch.int64) if tail else None
    workspace = new_workspace(2, "cpu")
    given = (tokens, numbers, numbers[:2], drafts[:, :4], numbers[:2])
    gpu.ngram_match(*given, min_n=2, max_n=16, rows=rows, tails=tails, workspace=workspace)


def main():
    variants = {}
    for tail in (0, 2):
        compile_launches(gpu, KERNELS, lambda tail=tail: launch(tail), variants)
    report(KERNELS, variants)
    for key, text in variants.items():
        assert "ld.global.v4.b32" in text, f"{key} does not read 16 bytes at once"
        assert "ld.local" not in text, f"{key} keeps an array on a stack"


if __name__ == "__main__":
    main()
