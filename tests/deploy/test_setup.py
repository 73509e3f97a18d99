import os
import shutil

import pytest

from harness.support import ROOT, ran

TOOLS = ("bash", "dirname", "env", "grep", "cat", "id")
# A fake Python that answers the script's checks, and stops it when it makes .venv.
PYTHON = """#!/bin/sh
case "$*" in
  *"(3, 11) <="*) exit {misfits} ;;
  *ensurepip*) exit 0 ;;
  *venv*) echo "{name} makes it"; exit 7 ;;
esac
"""


UNKNOWN = "does not exist, or is not 3.11, 3.12 or 3.13"


@pytest.mark.parametrize(
    ("pythons", "named", "said"),
    [
        ({"python3.13": True, "python3.11": True, "python3": False}, "", "python3.11 makes it"),
        ({"python3.13": True, "python3.12": True}, "", "python3.12 makes it"),
        ({"python3": True}, "", "python3 makes it"),  # Debian 13 has only this name
        ({"python3": True, "python3.13": False}, "", "python3 makes it"),
        ({"python3": False}, "", "missing: python3 python3-venv"),
        ({"python3.11": True, "python3.12": True}, "python3.12", "python3.12 makes it"),
        ({"python3.11": True}, "python3.10", f"PYTHON (python3.10) {UNKNOWN}"),
        ({"python3.14": False}, "python3.14", f"PYTHON (python3.14) {UNKNOWN}"),
        ({"python3.12": True}, "python3.12", "a .venv of a version other than python3.12: make clean"),
    ],
)
def test_a_python_is_chosen_or_refused(pythons, named, said, tmp_path):
    """Run the script with only these Pythons installed. The values say whether each is suitable."""
    (tools := tmp_path / "tools").mkdir()
    (tmp_path / "deploy" / "setup").mkdir(parents=True)
    script = shutil.copy(ROOT / "deploy" / "setup" / "venv", tmp_path / "deploy" / "setup" / "venv")
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name) or name)
    for name in ("g++", "redis-server", "ip"):
        (tools / name).symlink_to("/bin/true")
    for name, fits in pythons.items():
        (tools / name).write_text(PYTHON.format(name=name, misfits=int(not fits)))
        (tools / name).chmod(0o755)
    if "a version other than" in said:
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/echo")  # prints what it is asked to run
    environment = {**os.environ, "PATH": str(tools), **({"PYTHON": named} if named else {})}
    done = ran(tools / "bash", script, env=environment)
    assert done.returncode == (7 if "makes it" in said else 1)
    assert said in done.stdout + done.stderr


def test_bytecode_is_kept():
    """The Makefile overrides environments that forbid it, so that not every start compiles again."""
    command = ("make", "--no-print-directory", "--eval", "show: ; @env", "show")
    done = ran(*command, cwd=ROOT, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, check=True)
    assert "PATH=" in done.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout
