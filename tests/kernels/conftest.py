"""Without a GPU, Triton's kernels run in its interpreter: the same source, program by program, on the CPU.

Triton asks TRITON_INTERPRET when it is imported, when a kernel is defined and when it runs. Another test of
the same process may have imported it before (vLLM does): the first test of kernels then has it imported anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def _import_of_our_own() -> None:
    """Forget that triton was imported. Its C library stays: that can be loaded once."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]


@pytest.fixture(scope="module", autouse=not torch.cuda.is_available())
def _interpreter(_import_of_our_own: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture
def device() -> str:
    """The device on which the kernels under test run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
