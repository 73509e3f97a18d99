"""Let Ray's keepers fork `baton node` from the tests' zygote: each would import vLLM for nine seconds.

Ray runs `fork_nodes` in every worker process that it starts with `environment`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import psutil

from harness import zygote
from harness.support import ROOT

# Ray passes its environment on to its workers, and sets this variable itself for a job's setup hook.
_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"


def environment(folder: Path) -> dict[str, str]:
    """Return variables for Ray, whose keepers then log to a folder in `folder`."""
    zygote.shared()
    own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), zygote.FOLDER: str(zygote.folder())}
    return own | {_HOOK: f"{__name__}.{fork_nodes.__name__}"}


def nodes(folder: Path) -> list[psutil.Process]:
    """Return the running `baton node` processes of Ray with this folder."""
    wanted = f"baton node --orders --log-dir {folder}/"
    every = psutil.process_iter(["cmdline"])
    return [one for one in every if wanted in " ".join(one.info["cmdline"] or ())]


def parts(folder: Path) -> dict[str, psutil.Process]:
    """Return the running parts by name, of Ray with this folder."""
    found: dict[str, psutil.Process] = {}
    for node in nodes(folder):
        with suppress(psutil.Error):  # it has ended
            found |= {_title(part): part for part in node.children()}
    return {title.removeprefix("baton "): part for title, part in found.items() if title}


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()
    return ""


def fork_nodes() -> None:
    from baton.services.fleet import processes

    own = {"Popen": fork_node, "PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    mock.patch.object(processes, "subprocess", SimpleNamespace(**own)).start()


def fork_node(
    command: list[str], *, stderr: IO[bytes], env: Mapping[str, str], cwd: str | None, **_options: Any
) -> zygote.Forked:
    """Fork `python -P -m MODULE ARGUMENT ...`, and return it with the pipes of a Popen."""
    folder = Path(tempfile.mkdtemp(prefix="node-"))
    for name in ("stdin", "stdout"):
        os.mkfifo(folder / name)
    log = os.readlink(f"/proc/self/fd/{stderr.fileno()}")
    made = zygote.shared().start(
        "node",
        f"{__name__}:run_node",
        folder,
        command=command[3:],
        environment=dict(env),
        streams=[str(folder / "stdin"), str(folder / "stdout"), log],
        cwd=cwd or str(folder.parent),
    )
    made.stdin = (folder / "stdin").open("w")  # each waits until the fork opens its end
    made.stdout = (folder / "stdout").open(errors="backslashreplace")
    shutil.rmtree(folder)
    return made


def run_node(command: list[str], environment: Mapping[str, str], streams: list[str], cwd: str) -> None:
    """Run a module of Baton in place of a new program. Runs in the forked process."""
    flags = (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY | os.O_APPEND)
    for descriptor, (path, flag) in enumerate(zip(streams, flags, strict=True)):
        file = os.open(path, flag)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(cwd)
    zygote.become(command, environment)
