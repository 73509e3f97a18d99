import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from baton.handoff.memory import segments
from tests.handoff.host_device import HostDevice


def test_an_attachment_reads_the_owners_memory():
    segment = segments.create(10_000)
    segment.data[:] = np.arange(10_000) % 251
    other = segments.attach(segment.name).data
    segment.close()
    assert np.array_equal(other[:10_000], np.arange(10_000) % 251)  # mapped memory outlives its name
    assert not other.flags.writeable
    assert not segments.exists(segment.name)
    segment.close()


@pytest.mark.parametrize("name", ["../etc/passwd", "baton-kv-1-zz", "", "baton-kv-1-0123456789ab/../x"])
def test_invalid_names_are_refused(name):
    with pytest.raises(ValueError, match="not the name of a segment"):
        segments.attach(name)


def test_a_segment_that_is_gone_cannot_be_attached():
    segment = segments.create(4096)
    segment.close()
    with pytest.raises(FileNotFoundError):
        segments.attach(segment.name)


def test_too_little_shared_memory_is_an_error_not_a_crash():
    with pytest.raises(OSError, match=r"No space|too large|Cannot allocate|Invalid"):
        segments.create(1 << 50)


def test_memory_is_used_only_where_grown():
    size = 64 << 20
    segment = segments.create(size, present=4096)
    path = segments.DIRECTORY / segment.name
    assert path.stat().st_size == size
    assert path.stat().st_blocks * 512 == 4096
    segment.grow(1 << 20, 2 << 20)
    assert path.stat().st_blocks * 512 == 4096 + (1 << 20)
    segment.data[1 << 20 : 2 << 20] = 7
    assert (segments.attach(segment.name).data[1 << 20 : 2 << 20] == 7).all()
    segment.close()


def test_only_dead_owners_segments_are_stale(own_folder):
    mine = segments.create(4096)
    program = (
        "import pathlib, sys\nfrom baton.handoff.memory import segments\n"
        "segments.DIRECTORY = pathlib.Path(sys.argv[1])\n"
        "print(segments.create(4096).name, flush=True)\ninput()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, own_folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
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


@pytest.mark.parametrize("what", ["a pipe", "a folder", "a link", "a socket"])
def test_other_files_are_left_alone(what, tmp_path):
    """All users can write to the folder, so nothing in it may fail or delay a start."""
    name = f"baton-kv-{os.getpid()}-{secrets.token_hex(6)}"
    path = segments.DIRECTORY / name
    with contextlib.ExitStack() as stack:
        if what == "a pipe":
            os.mkfifo(path)
        elif what == "a folder":
            path.mkdir()
        elif what == "a link":
            path.symlink_to(tmp_path)
        else:
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        stack.callback(path.rmdir if what == "a folder" else path.unlink)
        assert name not in segments.remove_stale()
        assert path.is_symlink() or path.exists()
        with pytest.raises(OSError, match=name):
            segments.attach(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_stale_segment_is_left_alone(own_folder):
    """It can be opened but not removed, because the folder, like /dev/shm, has the sticky bit."""
    program = (
        "import os, pathlib, sys; from baton.handoff.memory import segments\n"
        "segments.DIRECTORY = pathlib.Path(sys.argv[1])\n"
        "os.setuid(12345); print(segments.remove_stale())"
    )
    own_folder.chmod(0o1777)
    path = own_folder / f"baton-kv-1-{secrets.token_hex(6)}"
    path.touch(0o644)
    line = [sys.executable, "-c", program, own_folder]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert path.exists()


def test_a_reader_pins_grown_memory_step_by_step(monkeypatch):
    monkeypatch.setattr(segments, "_PIN_BYTES", 2 << 20)
    segment = segments.create(8 << 20, 3 << 20)
    other = segments.attach(segment.name)
    device = HostDevice()
    start = other.data.ctypes.data

    def pinned(stop):
        return bool(device._pins.parts(start, start + stop))

    other.pin(device, 1 << 20)
    assert pinned(2 << 20)
    assert not pinned((2 << 20) + 1)
    other.pin(device, 2 << 20)  # nothing to do
    other.pin(device, 3 << 20)
    assert pinned(3 << 20)
    assert not pinned((3 << 20) + 1)  # not grown
    segment.grow(3 << 20, 8 << 20)
    other.pin(device, 8 << 20)
    assert device.pinned_parts(other.data[: 5 << 20]) == [
        (0, 2 << 20),
        (2 << 20, 3 << 20),
        (3 << 20, 5 << 20),
    ]
    view = other.data[: 1 << 20]
    del other
    assert device.pinned_parts(view)  # still in use
    del view
    assert not device._pins.parts(start, start + 1)
    segment.close()
