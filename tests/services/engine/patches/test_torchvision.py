"""The stand-in for torchvision, tested in a separate process because imports stay."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from harness import zygote
from harness.support import CALL_S

MODEL = "vllm.model_executor.models.qwen3_5"


def load_a_model() -> None:
    """In the forked process, import the model without the stand-in, then with it."""
    from transformers.utils import is_torchvision_available

    from baton.services.engine.patches import torchvision

    with pytest.raises(ModuleNotFoundError, match="torchvision"):  # otherwise the stand-in can go
        importlib.import_module(MODEL)
    torchvision.install()
    finders = len(sys.meta_path)
    torchvision.install()
    assert len(sys.meta_path) == finders, "the second call did something"
    assert importlib.import_module(MODEL).Qwen3_5ForCausalLM
    assert not is_torchvision_available(), "transformers would choose image processors that fail"
    with pytest.raises(ImportError, match="InterpolationMode"):  # the stand-in is empty
        from torchvision.transforms import InterpolationMode  # noqa: F401


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_text_model_loads_without_torchvision(tmp_path: Path) -> None:
    process = zygote.shared().start("torchvision", f"{__name__}:load_a_model", tmp_path)
    assert process.wait(CALL_S) == 0, process.text[-2000:]
