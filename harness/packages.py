"""Install plug-in packages into a test's folder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from harness.support import CALL_S, PYTHON


def install(package: Path, folder: Path) -> Path:
    """Install a package with its entry points into `folder`/site. Return that path, for PYTHONPATH."""
    source, site = folder / "source", folder / "site"
    shutil.copytree(package, source)  # setuptools builds in the source folder
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [str(PYTHON), "-m", "pip", "install", *options, "--target", str(site), str(source)]
    subprocess.run(command, check=True, timeout=CALL_S)
    return site
