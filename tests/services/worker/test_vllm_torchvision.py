"""The stand-in for torchvision, in a process of its own: what it makes importable stays imported."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest

from tests.support import CALL_S, PYTHON, ROOT

SCRIPT = """
import importlib, sys
from baton.services.worker import vllm_torchvision
from transformers.utils import is_torchvision_available

MODEL = "vllm.model_executor.models.qwen3_5"
try:
    importlib.import_module(MODEL)
except ModuleNotFoundError as error:
    assert error.name == "torchvision", error
else:
    sys.exit("vLLM imports Qwen3.5 without torchvision now: the stand-in can go")
vllm_torchvision.install()
finders = len(sys.meta_path)
vllm_torchvision.install()
assert len(sys.meta_path) == finders, "the second call did something"
assert importlib.import_module(MODEL).Qwen3_5ForCausalLM
assert not is_torchvision_available(), "transformers would choose image processors that fail"
try:
    from torchvision.transforms import InterpolationMode
except ImportError as error:
    print(error)
else:
    sys.exit("the stand-in has what it should not")
"""


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_model_for_text_loads_without_torchvision() -> None:
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=CALL_S,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "InterpolationMode" in done.stdout
