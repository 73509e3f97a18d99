"""Triton's compiler accepts the kernels; its interpreter is laxer."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.support import CALL_S

COMPILE = """
import importlib, sys
for operation in sys.argv[1:]:
    importlib.import_module(f"tests.kernels.{operation}.compile_all").main()
"""
OPERATIONS = ("kv_pack", "ngram_match", "verify")


@pytest.mark.skipif(torch.cuda.is_available(), reason="each operation's tests compile its kernels")
def test_kernels_compile_without_a_gpu():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *OPERATIONS],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * CALL_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    forms = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert len(forms) >= len(OPERATIONS)
    assert all(all(variants.values()) for variants in forms)
