import os

from harness.support import ROOT, ran


def test_bytecode_is_kept():
    """The Makefile overrides environments that forbid it, so that not every start compiles again."""
    command = ("make", "--no-print-directory", "--eval", "show: ; @env", "show")
    done = ran(*command, cwd=ROOT, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, check=True)
    assert "PATH=" in done.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout
