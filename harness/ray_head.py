"""A Ray cluster of one node on this machine, separate from any other that runs here."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.support import PYTHON, ROOT, running

# Without RAY_AUTH_MODE Ray would write a token into the home folder.
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}
STORE = "--object-store-memory=80000000"  # about the least
# Without these processes, which no test needs.
LESS = ("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor")


@dataclass(frozen=True)
class RayHead:
    process: subprocess.Popen[bytes]
    address: str  # host:port
    environment: dict[str, str]  # for commands that use it


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Yield a folder for Ray's files with a short name: sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_head(*options: str) -> Iterator[RayHead]:
    """Run `ray start --head` with further options until the end of the block."""
    with ray_folder() as folder:
        command = [str(PYTHON.with_name("ray")), "start", "--head", "--block", "--port=0", STORE, *LESS]
        command += [f"--temp-dir={folder}", "--node-ip-address=127.0.0.1", *options]
        whole = {**os.environ, **RAY, "RAY_TMPDIR": str(folder)}
        address = folder / "ray_current_cluster"

        def started() -> bool:
            return address.is_file() and ":" in address.read_text()

        with running(command, started, 30, folder / "start.log", env=whole, cwd=ROOT) as process:
            yield RayHead(process, address.read_text().strip(), whole)
