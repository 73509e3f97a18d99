"""A process is forked to find out whether forked processes could use the GPU."""

import os
import sys
from types import SimpleNamespace

import psutil
import pytest

from baton.services.engine.forking import cuda_begun

HERE = os.getpid()


def torch(*, built=True, initialized=False, counted=False):
    """Return a fake torch. `counted`: CUDA has counted GPUs, so forked processes cannot use them."""
    return SimpleNamespace(
        backends=SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: built)),
        cuda=SimpleNamespace(
            is_initialized=lambda: initialized, _is_in_bad_fork=lambda: counted and os.getpid() != HERE
        ),
    )


@pytest.mark.parametrize(
    ("found", "begun"),
    [
        (None, False),
        (torch(built=False, counted=True), False),
        (torch(), False),
        (torch(initialized=True), True),
        (torch(counted=True), True),
    ],
)
def test_cuda_has_begun_if_a_forked_process_could_not_use_it(found, begun, monkeypatch):
    if found is None:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "torch", found)
    before = psutil.Process().children()
    assert cuda_begun() is begun
    assert psutil.Process().children() == before


def test_the_real_torch_has_these_functions():
    import torch as real

    assert real.cuda._is_in_bad_fork() is False
    assert cuda_begun() is False
