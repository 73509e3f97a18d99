"""`python -m tests.kernels.kv_pack.compile_all [every]`: compile kv_pack's kernels for Hopper.

For each mixture of data types and each format to Triton's own form, where errors of types show, and caches as
engines have them to machine code as well; with `every` all of it to machine code.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any
from unittest import mock

import torch

from baton.kernels.kv_pack import WIRE_DTYPES, KVTable, gpu
from tests.kernels.compiling import compile_launches
from tests.kernels.kv_pack.layers import BF16, CACHES, FP16, FP32, Layer

KERNELS = ["pack_kernel", "unpack_kernel"]
QUANTISED = [wire for wire in WIRE_DTYPES if wire != "auto"]
DTYPES = [FP32, FP16, BF16, torch.uint8]
MIXTURES = [
    [Layer((2, 16, 2 * 32), 32, dtype) for dtype in mixture]
    for count in range(1, len(DTYPES) + 1)
    for mixture in itertools.combinations(DTYPES, count)
]
# Layers of different widths: lanes are masked.
UNEVEN = [Layer((2, 16, 2 * 24), 24, BF16), Layer((2, 16, 2 * 40), 40, FP16)]
WHOLE = ["gqa", "mla"]
HOPPER, AMPERE = (9, 0), (8, 0)  # before (8, 9) codes are made of bits


def launch(layers: list[Layer], wire: str) -> None:
    """Pack and unpack one block, so that each kernel is launched as it would be on a GPU."""
    blocks = [layer.poisoned("cpu") for layer in layers]
    table = KVTable(blocks, [layer.width for layer in layers], wire)
    ids, digests = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    records = torch.zeros(1, table.record_bytes, dtype=torch.uint8)
    gpu.pack(table, ids, records, digests)
    gpu.unpack(table, records, ids, digests)


def main() -> None:
    every = "every" in sys.argv
    first: dict[tuple[Any, ...], str] = {}
    whole: dict[tuple[Any, ...], str] = {}
    branches = [
        *((HOPPER, layers, wire) for layers in MIXTURES for wire in QUANTISED),
        *((AMPERE, MIXTURES[-1], wire) for wire in QUANTISED),
        (HOPPER, UNEVEN, "fp8_e4m3"),
        (HOPPER, MIXTURES[0], "auto"),
    ]
    caches = [(HOPPER, CACHES[name], wire) for name in (CACHES if every else WHOLE) for wire in WIRE_DTYPES]
    for form, cases in ((first, branches), (whole, caches + branches if every else caches)):
        for capability, layers, wire in cases:
            with mock.patch.object(torch.cuda, "get_device_capability", lambda _, found=capability: found):
                compile_launches(
                    gpu,
                    KERNELS,
                    lambda layers=layers, wire=wire: launch(layers, wire),  # type: ignore[misc]
                    whole=form is whole,
                    seen=form,
                )
        print({name: sum(key[0] == name for key in form) for name in KERNELS})
        for key, text in form.items():
            assert "f64" not in text, f"{key} computes in float64"


if __name__ == "__main__":
    main()
