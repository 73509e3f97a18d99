"""The scheduler runs on machines without an engine."""

from __future__ import annotations

import subprocess

from harness.support import CALL_S, PYTHON, ROOT


def test_the_scheduler_imports_neither_engines_nor_services() -> None:
    code = (
        "import importlib, pkgutil, sys; import baton.scheduler as top\n"
        "for one in pkgutil.walk_packages(top.__path__, 'baton.scheduler.'):\n"
        "    importlib.import_module(one.name)\n"
        "bad = [name for name in sys.modules if name.split('.')[0] in ('torch', 'vllm')"
        " or name.startswith('baton.services')]\n"
        "sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run(
        [PYTHON, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=CALL_S, check=False
    )
    assert done.returncode == 0, done.stderr
