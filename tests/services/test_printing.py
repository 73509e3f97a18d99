"""Printing with stdout and stderr in any state: nothing raises or blocks."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from baton.services import printing
from baton.services.printing import MOST_KEPT, Printer
from harness.support import CALL_S, PYTHON, eventually, full_pipe

LINE = b"x" * 79 + b"\n"


def read(descriptor):
    """Return what can be read now."""
    os.set_blocking(descriptor, False)
    found = b""
    try:
        while chunk := os.read(descriptor, 1 << 16):
            found += chunk
    except BlockingIOError:
        pass
    return found


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for descriptor in ends:
        os.close(descriptor)


def test_a_pipe_that_nobody_reads_keeps_nobody_waiting(pipe):
    reading, writing = pipe
    one = Printer(writing)
    for _ in range(2_000):  # 160 kB; the pipe holds 64 KiB
        one.write(LINE)
    assert one.behind
    assert os.get_blocking(writing)  # it may be shared with a shell
    found = b""
    while one.behind:
        found += read(reading)
        one.catch_up()
    assert found + read(reading) == LINE * 2_000


def test_lines_beyond_the_bound_are_counted(pipe):
    reading, writing = pipe
    one = Printer(writing)
    lines = (MOST_KEPT + (1 << 17)) // len(LINE)
    for _ in range(lines):
        one.write(LINE)
    found = b""
    while one.behind:
        found += read(reading)
        one.catch_up()
    one.write(b"later\n")
    found += read(reading)
    *_, lost, last = found.splitlines()
    assert last == b"later"
    assert int(lost.split()[0][1:]) + found.count(LINE) == lines


def test_a_reader_that_has_left_is_no_error(tmp_path):
    """A named pipe may have another reader later."""
    name = tmp_path / "pipe"
    os.mkfifo(name)
    reading = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(name, os.O_WRONLY)
    one = Printer(writing)
    os.close(reading)
    one.write(b"one\n")
    one.write(b"two\n")
    assert not one.behind
    reading = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    one.write(b"three\n")
    assert read(reading) == b"  (2 lines could not be printed)\nthree\n"
    os.close(reading)
    os.close(writing)


def test_a_full_disk_is_no_error():
    full = os.open("/dev/full", os.O_WRONLY)
    one = Printer(full)
    one.write(b"one\n")
    assert not one.behind
    os.close(full)


def test_a_terminal_that_is_gone_is_no_error():
    ours, theirs = pty.openpty()
    one = Printer(theirs)
    one.write(b"one\n")
    assert b"one" in os.read(ours, 100)
    os.close(ours)
    one.write(b"two\n")
    assert not one.behind
    os.close(theirs)


def test_what_the_encoding_lacks_is_escaped(tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        printing.put(stream, "caf\u00e9 \udcff\n")
        stream.close()
    assert (tmp_path / "out").read_text() == "caf\\xe9 \\udcff\n"


def test_a_child_does_not_print_what_its_parent_could_not(pipe):
    one = printing.printer(pipe[1])
    while not one.behind:
        one.write(LINE)
    if (child := os.fork()) == 0:
        os._exit(one.behind)
    assert os.waitpid(child, 0)[1] == 0
    del printing._printers[pipe[1]]


@pytest.mark.parametrize("streams", ["", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_without_its_streams_gets_empty_ones(streams, tmp_path):
    """Without them it would print into the next file that it opens."""
    code = (
        "from baton.services import printing; printing.open_streams(); f = open('f', 'w');"
        "printing.say('out'); printing.complain('err'); print('out', flush=True); f.close()"
    )
    command = f'exec "{sys.executable}" -c "{code}" {streams}'
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=CALL_S, check=False)
    assert done.returncode == 0
    assert (tmp_path / "f").read_text() == ""


def test_a_process_ends_though_nobody_reads_what_a_library_printed():
    """The library prints through Python's own stream, to a full pipe."""
    code = (
        "import sys; from baton.services import printing; from baton.services.leave import leave;"
        "sys.stdout.write('y' * 4000); printing.say('z'); leave(3)"
    )
    with full_pipe() as out:
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # so that leave() has something to flush
        done = subprocess.run([PYTHON, "-c", code], stdout=out, env=buffered, timeout=CALL_S, check=False)
    assert done.returncode == 3


def test_a_stopped_terminal_keeps_nobody_waiting():
    """Ctrl-S stops a terminal."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [PYTHON, "-c", "from baton.services import printing\nfor _ in range(9_999): printing.say('x' * 79)"],
        stdout=theirs,
    )
    try:
        eventually(lambda: child.poll() is not None, CALL_S, "it ends")
        assert child.returncode == 0
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        os.close(ours)
        os.close(theirs)
