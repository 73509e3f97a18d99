"""`python -m tests.kernels.kv_pack.compile_all [every]`: compile kv_pack's kernels for Hopper.

Each data type and all of them together, in every format, are compiled to Triton's own form, which finds type
errors. Typical caches are also compiled to machine code. `every` adds the other mixtures of data types, and
compiles all to machine code. It asserts that nothing is computed in float64, for which a GPU has few units,
and that KV is moved 16 bytes at a time.
"""

import itertools
import re
import sys
from functools import partial
from unittest import mock

import torch

from baton.kernels.kv_pack import WIRE_DTYPES, KVTable, gpu
from tests.kernels.compiling import compile_launches, report
from tests.kernels.kv_pack.layers import BF16, CACHES, FP16, FP32, Layer

KERNELS = ["pack_kernel", "unpack_kernel"]
QUANTISED = [wire for wire in WIRE_DTYPES if wire != "auto"]
DTYPES = [FP32, FP16, BF16, torch.uint8]
COUNTS = range(1, len(DTYPES) + 1) if "every" in sys.argv else (1, len(DTYPES))
MIXTURES = [
    [Layer((2, 16, 2 * 32), 32, dtype) for dtype in mixture]
    for count in COUNTS
    for mixture in itertools.combinations(DTYPES, count)
]
# With rows of different widths, the kernels need masks.
UNEVEN = [[*layers, Layer((2, 16, 2 * 24), 24, layers[0].dtype)] for layers in MIXTURES]
WHOLE = ["gqa", "mla"]
MOVES = re.compile(r"(ld|st)\.global[\w.:]*\.(?:v2\.b64|v4\.b32)")
HOPPER, AMPERE = (9, 0), (8, 0)  # before (8, 9) codes are converted by bit operations
BRANCHES = [
    *((HOPPER, layers, wire) for layers in MIXTURES for wire in QUANTISED),
    *((AMPERE, MIXTURES[-1], wire) for wire in QUANTISED),
    *((HOPPER, layers, "fp8_e4m3") for layers in UNEVEN),
    (HOPPER, MIXTURES[0], "auto"),
]


def launch(layers, wire):
    """Pack and unpack one block, so that each kernel is launched as it would be on a GPU."""
    blocks = [layer.poisoned("cpu") for layer in layers]
    table = KVTable(blocks, [layer.width for layer in layers], wire)
    ids, digests = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    records = torch.zeros(1, table.record_bytes, dtype=torch.uint8)
    gpu.pack(table, ids, records, digests)
    gpu.unpack(table, records, ids, digests)


def compile_cases(cases, seen, *, whole):
    for capability, layers, wire in cases:
        with mock.patch.object(torch.cuda, "get_device_capability", lambda _, found=capability: found):
            call = partial(launch, layers, wire)
            compile_launches(gpu, KERNELS, call, seen, whole=whole)


def assert_wide(wire, variants):
    """Check that each kernel reads and writes KV, as opposed to codes, 16 bytes at a time."""
    for key, text in variants.items():
        wanted = {"ld", "st"} if wire == "auto" else {"ld" if key[0] == "pack_kernel" else "st"}
        assert set(MOVES.findall(text)) == wanted, f"{key} does not move 16 bytes at once"


def main():
    every = "every" in sys.argv
    first = {}
    whole = {}
    compile_cases(BRANCHES, first, whole=False)
    for name, wire in itertools.product(WHOLE, WIRE_DTYPES):
        variants = {}
        compile_cases([(HOPPER, CACHES[name], wire)], variants, whole=True)
        assert_wide(wire, variants)
        whole |= variants
    if every:
        caches = [(HOPPER, layers, wire) for layers in CACHES.values() for wire in WIRE_DTYPES]
        compile_cases(BRANCHES + caches, whole, whole=True)
    for form in (first, whole):
        report(KERNELS, form)
        for key, text in form.items():
            assert "f64" not in text, f"{key} computes in float64"


if __name__ == "__main__":
    main()
