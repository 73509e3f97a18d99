"""The table of patches: its symbols exist, and functions are wrapped in its order."""

import importlib.util
import warnings
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from baton.services.engine.patches import table
from baton.services.engine.patches.replace import located, wrappers
from harness.support import ROOT

DRAFTING = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids"
HERE = ("any", "CPU" if current_platform.is_cpu() else "GPU")
SYMBOLS = sorted({symbol for one in (*table.PATCHES, *table.OBJECTS) for symbol in one.symbols})


def around(symbol):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(wrappers(*located(symbol)))


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_symbols_exist(symbol):
    if ":" in symbol:
        owner, name = located(symbol)
        assert callable(getattr(owner, name))
    else:
        assert importlib.util.find_spec(symbol) is not None


def test_every_patch_is_in_the_table():
    folder = ROOT / "services" / "engine" / "patches"
    modules = {path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")}
    named = {".".join(path.parts) for path in modules} - {"__init__", "cpu.__init__"}
    files = [Path(one.file) for one in table.OBJECTS]
    assert all((ROOT / file).is_file() for file in files)
    patches = [one.name for one in table.PATCHES]
    assert len(patches) == len(set(patches))
    on_objects = {file.stem for file in files if (ROOT / file).parent == folder}
    assert named - {"table", "replace"} == {*patches, *on_objects}


def test_patches_are_applied_once_and_in_order():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table.install()
        first = {
            symbol: around(symbol) for patch in table.PATCHES for symbol in patch.symbols if ":" in symbol
        }
        table.install()
    for symbol, found in first.items():
        assert around(symbol) == found
        names = [wrapper.__module__.removeprefix("baton.services.engine.patches.") for wrapper in found]
        rows = [patch for patch in table.PATCHES if symbol in patch.symbols and patch.platform in HERE]
        assert names == [patch.name for patch in rows]


def test_undrafted_wraps_the_patches_that_draft():
    names = [one.name for one in table.PATCHES if DRAFTING in one.symbols]
    assert names == ["idle_drafter", "drafts_v1", "undrafted", "step_times"]
