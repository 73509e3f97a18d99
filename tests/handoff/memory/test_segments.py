from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from baton.handoff.memory import segments


def test_what_is_written_is_read_through_an_attachment() -> None:
    segment = segments.create(10_000)
    segment.data[:] = np.arange(10_000) % 251
    other = segments.attach(segment.name)
    segment.close()
    assert np.array_equal(other[:10_000], np.arange(10_000) % 251)  # mapped memory outlives its name
    assert not other.flags.writeable
    assert not segments.exists(segment.name)
    segment.close()


@pytest.mark.parametrize("name", ["../etc/passwd", "baton-kv-1-zz", "", "baton-kv-1-0123456789ab/../x"])
def test_a_name_that_is_no_segments_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a segment"):
        segments.attach(name)


def test_a_segment_that_is_gone_cannot_be_attached() -> None:
    segment = segments.create(4096)
    segment.close()
    with pytest.raises(FileNotFoundError):
        segments.attach(segment.name)


def test_too_little_shared_memory_is_an_error_not_a_crash() -> None:
    with pytest.raises(OSError, match=r"No space|too large|Cannot allocate|Invalid"):
        segments.create(1 << 50)


def test_what_is_not_grown_takes_no_memory() -> None:
    size = 64 << 20
    segment = segments.create(size, present=4096)
    path = segments.DIRECTORY / segment.name
    assert path.stat().st_size == size
    assert path.stat().st_blocks * 512 == 4096
    segment.grow(1 << 20, 2 << 20)
    assert path.stat().st_blocks * 512 == 4096 + (1 << 20)
    segment.data[1 << 20 : 2 << 20] = 7
    assert (segments.attach(segment.name)[1 << 20 : 2 << 20] == 7).all()
    segment.close()


def test_only_dead_owners_segments_are_stale() -> None:
    mine = segments.create(4096)
    program = (
        "from baton.handoff.memory import segments\nprint(segments.create(4096).name, flush=True)\ninput()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        theirs = child.stdout.readline().strip()
        segments.remove_stale()
        assert segments.exists(theirs)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(timeout=10)
        assert segments.exists(theirs)
        assert theirs in segments.remove_stale()
        assert not segments.exists(theirs)
        assert segments.exists(mine.name)
    finally:
        child.kill()
        child.communicate()
        mine.close()
