"""Every patch of vLLM for GPUs is called on the null GPU."""

from pathlib import Path

import pytest

from baton.services.engine.patches import table

WRAPPED = [
    (patch.name, symbol.replace(":", ".").rpartition(".")[2])
    for patch in table.PATCHES
    for symbol in patch.symbols
    if patch.platform != "CPU"
]

# Patches of the objects of a loaded engine.
OBJECTS = [Path(one.file).stem for one in table.OBJECTS if one.file.startswith("services/engine/patches/")]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def entered(on_v2, on_v1):
    return on_v2.entered | on_v1.entered


@pytest.mark.parametrize(("patch", "attribute"), WRAPPED)
def test_a_patch_is_called(patch, attribute, entered):
    assert (patch, attribute) in entered


@pytest.mark.parametrize("patch", OBJECTS)
def test_a_patch_of_an_object_is_called(patch, entered):
    assert patch in {name for name, _ in entered}
