"""Early imports are exempt from garbage collection."""

import gc
import sys

import pytest

from baton.services.imports import collect_seldom, import_all


@pytest.mark.parametrize("enabled", [True, False])
def test_imports_are_exempt_from_collection(tmp_path, monkeypatch, enabled):
    name = f"imported_while_{enabled}"
    (tmp_path / f"{name}.py").write_text("import gc\nMADE = [[]]\nENABLED = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        import_all([name])
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    module = sys.modules.pop(name)
    assert not module.ENABLED
    assert not any(one is module.MADE for one in gc.get_objects())


def test_a_server_collects_seldom_and_never_what_was_there_when_it_began():
    before, there = gc.get_threshold(), [[]]
    try:
        collect_seldom()
        assert all(now > was for now, was in zip(gc.get_threshold(), before, strict=True))
        assert not any(one is there for one in gc.get_objects())
    finally:
        gc.set_threshold(*before)


def test_a_module_that_fails_leaves_the_collector_as_it_was():
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError):
        import_all(["no_such_module_anywhere"])
    assert gc.isenabled()
