"""Without a GPU, Triton's kernels run in its interpreter: the same source, program by program, on the CPU.

Triton asks TRITON_INTERPRET when it is imported, when a kernel is defined and when it runs. Another test of
the same process may have imported it before (vLLM does): tests of kernels then get an import of their own,
and the others have theirs back afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

_interpreted: dict[str, ModuleType] = {}


def _take_triton() -> dict[str, ModuleType]:
    """Forget that triton was imported. Its C library stays: that can be loaded once."""
    names = [name for name in sys.modules if name.partition(".")[0] == "triton" and "._C" not in name]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        others = _take_triton()
        sys.modules.update(_interpreted)
        yield
        _interpreted.update(_take_triton())
        sys.modules.update(others)


@pytest.fixture
def device() -> str:
    """Where the kernels under test run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
