"""The plug-in sets up processes of engines, but not those that only inspect a model class."""

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points

import pytest
from vllm.model_executor.models import registry

from baton.services.engine import plugin
from baton.services.engine.patches import table


def test_vllm_finds_it():
    (found,) = (one for one in entry_points(group="vllm.general_plugins") if one.name == "baton")
    assert found.load() is plugin.register


@pytest.mark.parametrize(("program", "times"), [(None, 1), ("baton", 1), (registry.__name__, 0)])
def test_no_patches_if_vllm_only_inspects_a_class(monkeypatch, program, times):
    installed = []
    monkeypatch.setattr(table, "install", lambda: installed.append(None))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", program and ModuleSpec(program, None))
    plugin.register()
    assert len(installed) == times
    assert registry.__name__ in registry._SUBPROCESS_COMMAND
