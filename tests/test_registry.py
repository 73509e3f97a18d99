"""The registry and entry points."""

from pathlib import Path

import pytest

from baton.errors import BatonError
from baton.registry import Registry


def registry(**changes):
    builtin = {"path": "pathlib:Path", "posix": "pathlib:PosixPath", "pure": "pathlib:PurePath"}
    builtin["gone"] = "nowhere:X"
    return Registry("path class", Path, builtin, aliases={"p": "path"}, **changes)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a package with these lines in the group `test.paths`."""

    def install(package, lines):
        folder = tmp_path / package / f"{package}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[test.paths]\n{lines}\n")
        monkeypatch.syspath_prepend(str(folder.parent))

    return install


def test_names_and_aliases_are_loaded():
    assert registry().load("path") is Path
    assert registry().load("p") is Path


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pth", "there is no path class 'pth'; did you mean 'path'?; there are: gone, path, posix, pure"),
        ("gone", "path class 'gone' cannot be loaded from nowhere:X (Baton): ModuleNotFoundError"),
        ("pure", "path class 'pure': pathlib:PurePath (Baton) is no Path"),
    ],
)
def test_load_errors(name, why):
    with pytest.raises(BatonError, match="path class") as refused:
        registry().load(name)
    assert str(refused.value).startswith(why)


def test_a_package_adds_a_name(installed):
    installed("more", "other = pathlib:WindowsPath")
    found = registry(group="test.paths")
    assert found.names() == ["gone", "other", "path", "posix", "pure"]
    assert found.load("other").__name__ == "WindowsPath"
    assert registry().names() == ["gone", "path", "posix", "pure"]


def test_a_name_registered_twice_is_refused(installed):
    installed("more", "path = pathlib:PosixPath")
    why = r"twice: pathlib:Path .Baton. and pathlib:PosixPath .package more.; uninst"
    with pytest.raises(BatonError, match=why):
        registry(group="test.paths").load("path")


def test_a_name_must_not_be_an_alias():
    with pytest.raises(ValueError, match="'path' is a name and an alias"):
        Registry("path class", Path, {"path": "pathlib:Path"}, aliases={"path": "path"})


def test_names_are_checked_without_an_import():
    registry().check(["gone"])
    with pytest.raises(BatonError, match="there is no path class"):
        registry().check(["path", "x"])


def test_former_names():
    with pytest.raises(BatonError, match=r"^there is no path class 'dir' any more; write 'path' instead$"):
        registry(former={"dir": "path"}).check(["dir"])
