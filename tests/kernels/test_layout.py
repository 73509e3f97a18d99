"""The kernels' folder is not a package by itself, and complete under its own name."""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness.support import PYTHON, ROOT

LINKS = ROOT / "src" / "baton" / "kernels"


def test_another_package_of_that_name_is_found_from_the_root(tmp_path: Path) -> None:
    """Hugging Face's `kernels`, which transformers imports, is not hidden."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.__file__)"
    done = subprocess.run(
        [PYTHON, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == str(tmp_path / "kernels" / "__init__.py")


def test_all_of_it_is_linked() -> None:
    parts = {path.name for path in (ROOT / "kernels").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {path.name for path in LINKS.iterdir() if path.is_symlink()} == parts - {"__pycache__"}
    assert all(path.exists() for path in LINKS.iterdir())
