"""Fixtures, and a check that no test leaves shared memory behind."""

import os
import tempfile
from pathlib import Path

import pytest

from baton.handoff.memory import segments
from baton.handoff.memory.segments import DIRECTORY
from harness import support
from tests.handoff import checkpoints


def own_segments():
    return [path.name for path in DIRECTORY.glob(f"baton-kv-{os.getpid()}-*")]


@pytest.fixture(autouse=True)
def _no_segments_left():
    before = own_segments()  # left by an earlier test that failed
    yield
    assert [name for name in own_segments() if name not in before] == []


@pytest.fixture
def own_folder(monkeypatch):
    """A separate folder for segments, because any engine that starts clears the usual one."""
    with tempfile.TemporaryDirectory(prefix="baton-test-", dir=DIRECTORY) as folder:
        monkeypatch.setattr(segments, "DIRECTORY", Path(folder))
        yield Path(folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A checkpoint that loads in a second."""
    return checkpoints.qwen2(tmp_path_factory.mktemp("checkpoints") / "qwen2")


@pytest.fixture
def eventually():
    """A function that polls until a condition holds, for ten seconds on an idle machine."""
    return lambda condition: support.eventually(condition, 10, "it happens", 0.002)
