"""Digests of files: each file is read once, and a kept digest is used only while it is certainly right."""

import fcntl
import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.services.engine import file_digests
from baton.services.engine.file_digests import FOLDER, KEEP_FROM, digests

OLD = b"a" * KEEP_FROM
NEW = b"b" * KEEP_FROM


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_digests, "QUIET_S", -1.0)  # a test's files have just been written
    return tmp_path / "cache" / FOLDER


@pytest.fixture
def reads(monkeypatch):
    """Count the files that are read."""
    found = []
    real = file_digests._hash

    def counted(file, progress):
        found.append(file)
        return real(file, progress)

    monkeypatch.setattr(file_digests, "_hash", counted)
    return found


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(OLD)
    return path


def entries(kept):
    return sorted(kept.glob("*.json"))


def test_a_file_is_read_once(file, reads, kept):
    assert [digests([file]) for _ in range(3)] == [[sha256(OLD)]] * 3
    assert len(reads) == 1
    assert [entry.stat().st_mode & 0o777 for entry in entries(kept)] == [0o600]
    assert kept.stat().st_mode & 0o777 == 0o700


def test_a_change_that_keeps_size_and_write_time_is_seen(file, reads):
    digests([file])
    before = file.stat()
    file.write_bytes(NEW)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digests([file]) == [sha256(NEW)]
    file.unlink()  # the next file may get its inode
    file.write_bytes(OLD)
    assert digests([file]) == [sha256(OLD)]
    assert len(reads) == 3


def test_digests_of_files_changed_just_now_are_not_kept(file, reads, kept, monkeypatch):
    monkeypatch.setattr(file_digests, "QUIET_S", 60.0)
    for _ in range(2):
        digests([file])
    assert len(reads) == 2
    assert not entries(kept)


def falsify(kept):
    (entry,) = entries(kept)
    entry.write_text(json.dumps(json.loads(entry.read_text()) | {"sha256": "0" * 64}))


def link(entry):
    entry.rename(entry.parent / "elsewhere")
    entry.symlink_to(entry.parent / "elsewhere")


# Ways to make an entry untrustworthy.
SPOILED = {
    "writable": lambda entry: entry.chmod(0o666),
    "of another user": lambda entry: os.chown(entry, 12345, -1),
    "a link": link,
    "damaged": lambda entry: entry.write_text("{"),
    "in a writable folder": lambda entry: entry.parent.chmod(0o777),
    "in another user's folder": lambda entry: os.chown(entry.parent, 12345, -1),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_entries_that_others_may_have_written_are_ignored(file, kept, spoil, reads):
    digests([file])
    falsify(kept)
    assert digests([file]) == ["0" * 64]  # it is used
    spoil(*entries(kept))
    assert digests([file]) == [sha256(OLD)]
    assert len(reads) == 2


def test_without_a_home_digests_are_not_kept(file, monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    caplog.set_level("WARNING", file_digests.__name__)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert digests([file]) == [sha256(OLD)]
    assert "computed again at each start: Could not determine home directory" in caplog.text


def test_blobs_of_a_hub_are_not_read(tmp_path, reads):
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / ("c" * 64)).write_bytes(OLD)
    link = tmp_path / "model.safetensors"
    link.symlink_to(blobs / ("c" * 64))
    assert digests([link]) == ["c" * 64]
    link.unlink()
    (tmp_path / ("d" * 64)).write_bytes(OLD)  # not in a folder "blobs"
    link.symlink_to(tmp_path / ("d" * 64))
    assert digests([link]) == [sha256(OLD)]
    assert len(reads) == 1


def test_one_process_hashes_while_others_wait(file, kept, reads):
    digests([file])
    (entry,) = entries(kept)
    content = entry.read_text()
    entry.unlink()
    lock = os.open(f"{entry}.lock", os.O_RDWR)  # a process that hashes the file takes this lock
    fcntl.flock(lock, fcntl.LOCK_EX)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(digests, [file])
        time.sleep(0.3)  # it waits
        assert not other.done()
        entry.write_text(content)
        entry.chmod(0o600)
        os.close(lock)
        assert other.result(10) == [sha256(OLD)]
    assert len(reads) == 1


def test_the_wait_for_another_process_is_bounded(file, kept, reads):
    digests([file])
    (entry,) = entries(kept)
    entry.unlink()
    with open(f"{entry}.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert digests([file]) == [sha256(OLD)]
    assert len(reads) == 2


def test_progress_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(file_digests, "TELL_S", 0.0)
    caplog.set_level("INFO", file_digests.__name__)
    (tmp_path / "large").write_bytes(bytes(20 << 20))
    digests([tmp_path / "large"])
    assert "hashed of 0.0" in caplog.text
    assert "it is kept for the next start" in caplog.text


def test_an_unreadable_file_raises(tmp_path):
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="gone"):
        digests([tmp_path / "gone"])
