"""`python -m tests.kernels.verify.compile_all [every]`: compile verify's kernels for Hopper, some or all
variants."""

from __future__ import annotations

import itertools
import sys

import torch

from baton.kernels.verify import gpu
from harness.verify_cases import Shape
from tests.kernels.compiling import compile_launches

KERNELS = ["stats_kernel", "gather_kernel", "cut_kernel", "accept_kernel", "residual_kernel", "settle_kernel"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EVERY = list(
    itertools.product(
        ["standard", "block"], ["one-hot", "probs", "logits"], ["", "kpm"], [True, False], DTYPES
    )
)
SOME = [
    ("standard", "one-hot", "", False, torch.bfloat16),
    ("block", "logits", "kpm", True, torch.float32),
]


def main() -> None:
    for method, proposal, filters, packed, dtype in EVERY if "every" in sys.argv else SOME:
        shape = Shape(3, 3, 32_000, 1024, method, proposal, filters, dtype, packed)  # type: ignore[arg-type]
        job = shape.job(0)
        print(
            method,
            proposal,
            filters,
            dtype,
            compile_launches(gpu, KERNELS, lambda job=job: gpu.verify(job)),
        )  # type: ignore[misc]


if __name__ == "__main__":
    main()
