import os
import shutil
import subprocess
import sys
import time
import tracemalloc

import pytest

from baton.services.fleet import log_files
from baton.services.fleet.log_files import KEPT, TAIL_BYTES, Rotation
from harness.support import PATIENCE

MOST = 1 << 20


def rotation():
    one = Rotation(MOST)
    one._due = 0.0
    return one


def test_a_log_that_grows_is_rotated_and_nothing_is_lost(tmp_path):
    """Processes keep writing through the descriptor that they inherited."""
    log = tmp_path / "part.log"
    code = "import os\nfor n in range(40_000): os.write(1, b'%079d\\n' % n)"
    writing = log_files.open_log(log)
    written = subprocess.run([sys.executable, "-c", code], stdout=writing, check=True)
    assert written.returncode == 0
    assert rotation().look([log]) == [log]
    os.write(writing, b"later\n")
    os.close(writing)
    assert log.read_bytes() == b"later\n"
    kept = (tmp_path / "part.log.1").read_bytes().splitlines()
    assert [int(line) for line in kept] == list(range(40_000))


def test_few_older_logs_are_kept(tmp_path):
    log = tmp_path / "part.log"
    for number in range(KEPT + 2):
        log.write_bytes(b"%d" % number * (MOST + 1))
        assert rotation().look([log]) == [log]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "part.log",
        *(f"part.log.{number}" for number in range(1, KEPT + 1)),
    ]
    assert (tmp_path / "part.log.1").read_bytes()[:1] == b"%d" % (KEPT + 1)
    log.write_bytes(b"x" * MOST)
    assert rotation().look([log, tmp_path / "none.log"]) == []
    log.write_bytes(b"x" * (MOST + 1))
    assert Rotation(MOST).look([log]) == []  # not due yet


def test_on_a_full_disk_a_log_is_cut_all_the_same(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "baton-test", disk], check=False).returncode:
        pytest.skip("may not mount")
    try:
        log = disk / "part.log"
        log.write_bytes(b"x" * (MOST + (MOST >> 1)))
        assert rotation().look([log]) == [log]
        assert log.stat().st_size == 0
        assert shutil.disk_usage(disk).free > MOST
    finally:
        subprocess.run(["umount", disk], check=True)


def test_only_the_end_of_a_log_is_read(tmp_path):
    log = tmp_path / "part.log"
    with log.open("wb") as file:
        file.truncate(1 << 30)  # a hole
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe last line\n\n")
    tracemalloc.start()
    began = time.monotonic()
    assert log_files.tail(log)[-1] == "the last line"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * TAIL_BYTES
    assert time.monotonic() - began < 5 * PATIENCE


def test_lines_of_a_predecessor_are_left_out(tmp_path):
    log = tmp_path / "part.log"
    log.write_bytes(b"before\nafter\n")
    assert log_files.tail(log, 7) == ["after"]
    assert log_files.tail(log, 99) == ["before", "after"]  # it has been truncated
    assert log_files.tail(tmp_path / "none.log") == []
