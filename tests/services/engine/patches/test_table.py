"""The table of patches: its page, its symbols, the order in which it wraps what several patches wrap."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from typing import Any

import pytest

from baton.services.engine.patches import table
from baton.services.engine.patches.replace import Wrapper, wrappers
from harness.support import ROOT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.platforms import current_platform

DRAFTING = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids"
HERE = ("any", "CPU" if current_platform.is_cpu() else "GPU")
SYMBOLS = sorted({symbol for one in (*table.PATCHES, *table.OBJECTS) for symbol in one.symbols})


def owner_of(symbol: str) -> tuple[Any, str]:
    """The module or class that has it, and its name there."""
    module, _, path = symbol.partition(":")
    *owners, name = path.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return functools.reduce(getattr, owners, importlib.import_module(module)), name


def around(symbol: str) -> list[Wrapper]:
    return list(wrappers(*owner_of(symbol)))


def test_the_page_is_the_tables() -> None:
    page = (ROOT / "docs" / "patches.md").read_text()
    assert page == table.page(), "run: python -m baton.services.engine.patches.table > docs/patches.md"


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_its_symbols_exist(symbol: str) -> None:
    if ":" in symbol:
        owner, name = owner_of(symbol)
        assert callable(getattr(owner, name))
    else:
        assert importlib.util.find_spec(symbol) is not None


def test_every_patch_is_in_it() -> None:
    folder = ROOT / "services" / "engine" / "patches"
    modules = {path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")}
    named = {".".join(path.parts) for path in modules} - {"__init__", "cpu.__init__"}
    objects = {one.file for one in table.OBJECTS}
    for file in objects:
        assert (ROOT / file).is_file()
    patches = [one.name for one in table.PATCHES]
    assert len(patches) == len(set(patches))
    assert named - {
        "table",
        "replace",
        "signatures",
        "draft_length",
        "first_drafts",
        "giving_way",
        "early_loads",
        "failed_step",
    } == set(patches)


def test_it_is_applied_once_and_in_its_order() -> None:
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


def test_who_drafts_and_who_takes_drafts_away() -> None:
    names = [one.name for one in table.PATCHES if DRAFTING in one.symbols]
    assert names == ["idle_drafter", "drafts_v1", "undrafted", "step_times"]
