import os
import subprocess

from harness.support import CALL_S, ROOT


def test_bytecode_is_kept():
    """The Makefile overrides environments that forbid it, so that not every start compiles again."""
    done = subprocess.run(
        ["make", "--no-print-directory", "--eval", "show: ; @env", "show"],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=CALL_S,
        check=True,
    )
    assert "PATH=" in done.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout
