"""The interface of a load tool for bench/clients.py, and the environment that tools are installed in.

It is a virtual environment of its own, made at first use: the tools' dependencies conflict with vLLM's.
bench/tools.txt pins them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from harness.support import ROOT

Figures = dict[str, float]
PINS = Path(__file__).with_name("tools.txt")
INSTALL_S = 1800.0
TOKENIZER = ROOT / "deploy" / "demo-model" / "weights"


class Tool(Protocol):
    """A load tool. Each of its figures is better or worse on its own; `failed` counts requests."""

    about: str  # a sentence or two for the page, in Markdown
    columns: Sequence[str]  # of its table: keys of its figures
    loads: Sequence[str]  # run one after the other

    def prepare(self) -> None:
        """Do slow work once, before the servers start."""

    def run(self, url: str, load: str, folder: Path, seed: int) -> dict[str, Figures]:
        """Run a load. Return figures by row of the table, as one load may measure several things.

        Raises RuntimeError with the end of the tool's output when it gives no figures.
        """


def installed(name: str, pins: Path = PINS) -> str:
    """Return the path of a command, after installing its pins if they have changed."""
    folder = ROOT / f".venv-{pins.stem}"
    mark = folder / "pins.txt"  # written last
    if not mark.exists() or mark.read_bytes() != pins.read_bytes():
        print(f"installing bench/{pins.name} into {folder.name} (some minutes)", flush=True)
        # This environment's pip installs into it: one of its own would take five seconds.
        venv = [sys.executable, "-m", "venv", "--clear", "--without-pip", folder]
        subprocess.run(venv, check=True, timeout=INSTALL_S)
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
        pip += ["--disable-pip-version-check", "install", "-qq", "--no-deps", "-r", str(pins)]
        done = subprocess.run(pip, timeout=INSTALL_S, check=False)
        if done.returncode:
            raise SystemExit(
                f"pip could not install bench/{pins.name}. torch==2.13.0+cpu comes from PyTorch's own CPU"
                " wheel index: name that index in PIP_EXTRA_INDEX_URL"
            )
        shutil.copyfile(pins, mark)
    return str(folder / "bin" / name)


def command(
    line: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Run an installed tool in `folder`. Return "" or, when it failed, the end of its output."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        **environment,
    }
    log = folder / "tool.log"
    with log.open("wb") as out:
        done = subprocess.run(
            ["nice", "-n", "5", *line],  # it shares the cores with the servers
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    said = log.read_text(errors="replace")[-2000:]
    return f"{line[0]} ended with {done.returncode}:\n{said}" if done.returncode else ""
