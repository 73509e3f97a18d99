"""The set-up script's choice of Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.support import ROOT

TOOLS = ("bash", "dirname", "env", "grep", "cat", "id")
# A fake Python that answers the script's checks, and stops it when it makes .venv.
PYTHON = """#!/bin/sh
case "$*" in
  *"(3, 11) <="*) exit {misfits} ;;
  *ensurepip*) exit 0 ;;
  *venv*) echo "{name} makes it"; exit 7 ;;
esac
"""


@pytest.fixture
def run(tmp_path: Path) -> object:
    """Return a function that runs the script with only these Pythons; values: whether they fit."""

    def script(pythons: dict[str, bool], **more: str) -> subprocess.CompletedProcess[str]:
        (tools := tmp_path / "tools").mkdir()
        (tmp_path / "deploy" / "setup").mkdir(parents=True)
        shutil.copy(ROOT / "deploy" / "setup" / "venv", tmp_path / "deploy" / "setup" / "venv")
        for name in TOOLS:
            (tools / name).symlink_to(shutil.which(name) or name)
        for name in ("g++", "redis-server", "ip"):
            (tools / name).symlink_to("/bin/true")
        for name, fits in pythons.items():
            (tools / name).write_text(PYTHON.format(name=name, misfits=int(not fits)))
            (tools / name).chmod(0o755)
        environment = {**os.environ, "PATH": str(tools), **more}
        return subprocess.run(
            [str(tools / "bash"), str(tmp_path / "deploy" / "setup" / "venv")],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return script


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3.13": True, "python3.11": True, "python3": False}, "python3.11"),
        ({"python3.13": True, "python3.12": True}, "python3.12"),
        ({"python3": True}, "python3"),  # as on Debian 13
        ({"python3": True, "python3.13": False}, "python3"),
    ],
)
def test_the_first_suitable_python_is_used(run: object, pythons: dict[str, bool], taken: str) -> None:
    done = run(pythons)  # type: ignore[operator]
    assert f"{taken} makes it" in done.stdout, done.stderr
    assert done.returncode == 7


def test_a_named_python_is_used(run: object) -> None:
    done = run({"python3.11": True, "python3.12": True}, PYTHON="python3.12")  # type: ignore[operator]
    assert "python3.12 makes it" in done.stdout, done.stderr


@pytest.mark.parametrize("named", ["python3.10", "python3.14"])
def test_an_unsuitable_named_python_is_refused(run: object, named: str) -> None:
    done = run({"python3.11": True, "python3.14": False}, PYTHON=named)  # type: ignore[operator]
    assert done.returncode == 1
    assert f"PYTHON ({named}) does not exist, or is not 3.11, 3.12 or 3.13: name another" in done.stderr


def test_an_environment_of_another_version_is_kept(run: object, tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/echo")  # prints what it is asked to run
    done = run({"python3.12": True}, PYTHON="python3.12")  # type: ignore[operator]
    assert done.returncode == 1
    assert "there is a .venv of another version than python3.12: make clean" in done.stderr


def test_missing_packages_are_listed(run: object) -> None:
    done = run({"python3": False})  # type: ignore[operator]
    assert done.returncode == 1
    assert "missing: python3 python3-venv" in done.stderr
