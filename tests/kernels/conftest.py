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
        _prepare_once_a_launch(patch)
        if NumpyVersion(np.__version__) >= "2.5.0":
            _count_by_scalars(patch)
        yield


def _prepare_once_a_launch(patch):
    """Let a kernel's functions replace triton.language's once in a launch.

    Triton's interpreter looks through the whole module at each call, which takes a third of its time.
    """
    from triton.runtime import interpreter

    launch, patch_lang = interpreter.GridExecutor.__call__, interpreter._patch_lang
    done = set()

    def launched(self, *args, **kwargs):
        done.clear()
        return launch(self, *args, **kwargs)

    def patched(function):
        names = id(function.__globals__)
        if names in done:
            return None
        done.add(names)
        return patch_lang(function)

    patch.setattr(interpreter.GridExecutor, "__call__", launched)
    patch.setattr(interpreter, "_patch_lang", patched)


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
