"""Run Triton's kernels in its interpreter if there is no GPU: the same source, on the CPU.

Triton reads TRITON_INTERPRET when it is imported, when a kernel is defined and when it runs. vLLM may have
imported it earlier in this process, so the first test of kernels imports it again.
"""

import sys

import numpy as np
import pytest
import torch
from numpy.lib import NumpyVersion


@pytest.fixture(scope="session")
def _import_again():
    """Forget that triton was imported, except for its C library, which can be loaded only once."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]


@pytest.fixture(scope="module", autouse=not torch.cuda.is_available())
def _interpreter(_import_again):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        if NumpyVersion(np.__version__) >= "2.5.0":
            _count_by_scalars(patch)
        yield


def _count_by_scalars(patch):
    """Let a kernel's loop have a bound that it loaded.

    Triton 3.6's interpreter converts an array of one number to int, which NumPy refuses from 2.5 on.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
