"""Triton's compiler accepts the kernels, and not its laxer interpreter alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.support import CALL_S


@pytest.mark.skipif(torch.cuda.is_available(), reason="each operation's tests compile its kernels")
@pytest.mark.parametrize("operation", ["kv_pack", "verify"])
def test_kernels_compile_where_there_is_no_gpu(operation: str) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{operation}.compile_all"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * CALL_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first_form, machine_code = map(ast.literal_eval, done.stdout.splitlines())
    assert all(first_form.values())
    assert all(machine_code.values())
