"""Tests in forked workers: reports, fixtures of several files, dead workers, and an early end."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from harness.support import CALL_S, PYTHON, ROOT

CONFTEST = """
    import os
    import pytest
    from tests import side_by_side

    def pytest_runtestloop(session):
        groups = {}
        for number, item in enumerate(session.items):
            groups.setdefault(item.path.stem.rstrip("0123456789"), []).append(number)
        side_by_side.run(session, 2, list(groups.values()))
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True

    @pytest.fixture(scope="session")
    def owner():
        yield os.getpid()
        print("the owner ends")
"""
SHARED = """
    import os

    def test_one(owner, tmp_path):
        assert owner == os.getpid()
        assert tmp_path.parent.name.startswith("worker-")
"""
DYING = """
    import os
    import signal
    import warnings

    def test_warns():
        warnings.warn("look here")

    def test_fails(capfd):
        os.write(1, b"written before")
        assert False

    def test_dies():
        os.kill(os.getpid(), signal.SIGKILL)

    def test_after_the_death():
        pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"conftest": CONFTEST, "test_shared1": SHARED, "test_shared2": SHARED, "test_dying": DYING}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    (tmp_path / "pytest.ini").write_text("[pytest]")
    return tmp_path


def run(folder: Path, *options: str) -> str:
    command = [
        PYTHON,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
        f"--rootdir={folder}",
        folder,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=CALL_S,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_a_dead_worker_fails_its_test_and_another_one_runs_the_rest(folder: Path) -> None:
    said = run(folder)
    assert re.search(r"\b2 failed, 4 passed, 1 warning\b", said), said
    assert re.search(r"_ test_dies _+\nworker \d ended with code -9", said)
    assert "written before" in said
    assert "UserWarning: look here" in said


def test_the_first_failure_ends_the_run(folder: Path) -> None:
    said = run(folder, "-x")
    assert "stopping after 1 failures" in said
    assert "test_dies" not in said
