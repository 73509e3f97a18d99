"""The folder `kernels` is not a package of that name, and all of it is linked into `baton.kernels`."""

import subprocess

from harness.support import PYTHON, ROOT

LINKS = ROOT / "src" / "baton" / "kernels"


def test_the_folder_does_not_hide_hugging_faces_kernels(tmp_path):
    """transformers imports that package."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.__file__)"
    done = subprocess.run(
        [PYTHON, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == str(tmp_path / "kernels" / "__init__.py")


def test_all_kernels_are_linked():
    parts = {path.name for path in (ROOT / "kernels").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {path.name for path in LINKS.iterdir() if path.is_symlink()} == parts - {"__pycache__"}
    assert all(path.exists() for path in LINKS.iterdir())
