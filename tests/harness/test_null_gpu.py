"""The parts of the null GPU that work in this environment; tests/null_gpu tests the rest."""

import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from baton.services.engine.patches import replace as shipped
from harness.null_gpu import entered, libraries

PACKAGES = Path(sysconfig.get_path("purelib"))


@pytest.mark.parametrize("source", sorted({source for _, source in libraries.LIBRARIES.values() if source}))
def test_its_libraries_compile(source, tmp_path):
    assert libraries._compile(source, PACKAGES, tmp_path / "own.o")


class Owner:
    def method(self, number):
        return number

    @classmethod
    def of_class(cls, number):
        return number


def test_a_called_patch_is_noted_once(tmp_path, monkeypatch):
    monkeypatch.setenv(entered.FILE, str(tmp_path / "entered"))
    module = ModuleType("stand-in")
    module.replace = shipped.replace
    entered.count(module)

    def plus_one(original, *args):
        return original(*args) + 1

    plus_one.__module__ = "baton.services.engine.patches.some.patch"
    for _ in range(2):  # a second call does nothing
        module.replace(Owner, "method", plus_one, ("self", "number"))
        module.replace(Owner, "of_class", plus_one, ("cls", "number"))
    assert entered.read(tmp_path / "entered") == set()
    assert [Owner().method(1), Owner().method(2), Owner.of_class(5)] == [2, 3, 6]
    assert entered.read(tmp_path / "entered") == {("some.patch", "method"), ("some.patch", "of_class")}
    assert (tmp_path / "entered").read_text().count("\n") == 2
    assert shipped.wrappers(Owner, "method") == (plus_one,)
