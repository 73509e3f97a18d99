"""Every patch of vLLM that acts on a GPU is entered there."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.services.engine.patches import table
from tests.null_gpu.arms import Trial

# What no deployment here enters, by patch and attribute, and why.
LEFT_OUT = {
    (
        "torchvision",
        "qwen3_5",
    ): "vLLM for CUDA brings torchvision, and the patch stands in where it is missing",
}
WRAPPED = [
    (patch.name, symbol.replace(":", ".").rpartition(".")[2])
    for patch in table.PATCHES
    for symbol in patch.symbols
    if patch.platform != "CPU"
]

# Those on the objects of a loaded engine.
OBJECTS = [Path(one.file).stem for one in table.OBJECTS if one.file.startswith("services/engine/patches/")]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def entered(on_v2: Trial, on_v1: Trial) -> set[tuple[str, str]]:
    return on_v2.entered | on_v1.entered


@pytest.mark.parametrize(("patch", "attribute"), WRAPPED)
def test_it_is_entered(patch: str, attribute: str, entered: set[tuple[str, str]]) -> None:
    if why := LEFT_OUT.get((patch, attribute)):
        assert (patch, attribute) not in entered, f"it is entered: not left out because {why}"
        pytest.skip(why)
    assert (patch, attribute) in entered


@pytest.mark.parametrize("patch", OBJECTS)
def test_it_is_entered_on_an_object(patch: str, entered: set[tuple[str, str]]) -> None:
    assert patch in {name for name, _ in entered}
