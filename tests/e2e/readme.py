"""Run README's shell commands as a reader would, in a network namespace where its ports are free."""

import ctypes
import json
import os
import re
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness import zygote
from harness.support import PYTHON, ROOT, listening, ran
from harness.zygote import Forked

PORTS = (8000, 7400)
_CLONE_NEWNET = 0x40000000
# Replaces `baton`: prints its arguments, in one write because several print at the same time.
_TELL_ONE = "import json, sys; sys.stdout.write(json.dumps(sys.argv[1:]) + chr(10))"
_TELL = f"""baton() {{ {PYTHON} -c '{_TELL_ONE}' "$@"; }}\n"""


def shell_blocks():
    """Return README's ```bash blocks, in order."""
    return re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


@dataclass
class Reader:
    """A reader with a shell in a folder. netns: the file of a network namespace, if any."""

    folder: Path
    netns: str = ""
    started: list[Forked] = field(default_factory=list)

    def shell(self, script):
        """Run a block in the activated environment and return its stdout. It must succeed."""
        enter = ["nsenter", f"--net={self.netns}"] if self.netns else []
        done = ran(*enter, "bash", "-euc", f"source .venv/bin/activate\n{script}", cwd=self.folder)
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def commands(self, block):
        """Return the arguments of each `baton` in a block as the shell splits them, the scheduler first."""
        told = self.shell(f"{_TELL}{block}\nwait")
        return sorted(map(json.loads, told.splitlines()), key=lambda one: one[0] != "scheduler")

    def start(self, arguments):
        """Fork `baton ARGUMENT ...` in the background."""
        name = f"{len(self.started)}-{arguments[0]}"
        call = "tests.e2e.readme:run_there"
        where = {"netns": self.netns, "folder": str(self.folder)}
        process = zygote.shared().start(name, call, self.folder, arguments=arguments, **where)
        self.started.append(process)
        return process


def run_there(arguments, netns, folder):
    """Run `baton ARGUMENT ...` in the reader's network. Called in the forked process."""
    os.chdir(folder)
    if netns:
        descriptor = os.open(netns, os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {netns}")
        os.close(descriptor)
    zygote.run_baton(arguments)


@contextmanager
def reader(folder):
    """Yield a reader and end what it started. Skips if README's ports are taken and not root."""
    for name in ("deploy", ".venv"):
        (folder / name).symlink_to(ROOT / name)
    with _namespace() as netns:
        if not netns and (taken := [port for port in PORTS if listening(port)]):
            pytest.skip(f"README's ports {taken} are taken, and only root can make a network namespace")
        one = Reader(folder, netns)
        try:
            yield one
        finally:
            zygote.end_all(list(reversed(one.started)), 30)


@contextmanager
def _namespace():
    name = f"baton-readme-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        made = False
    if not made:
        yield ""
        return
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield f"/run/netns/{name}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
