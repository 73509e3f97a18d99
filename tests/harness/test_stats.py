import json
import subprocess

import pytest

from harness import stats
from harness.stats import compared, spread


def git(folder, *command):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", "-C", folder, *who, *command], capture_output=True, check=True, text=True)
    return done.stdout.strip()


def test_a_result_names_its_commit_and_whether_the_tree_was_changed(tmp_path):
    assert stats.tree(tmp_path) == {"commit": "", "dirty": True}  # not a repository
    git(tmp_path, "init", "-q")
    (tmp_path / "code").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    clean = {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    assert stats.tree(tmp_path) == clean
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "a.json").write_text("{}")  # the file of an earlier run
    assert stats.tree(tmp_path) == clean
    for name in ("code", "untracked"):
        (tmp_path / name).write_text("two")
        assert stats.tree(tmp_path) == {**clean, "dirty": True}
        git(tmp_path, "checkout", "-q", "code")
        (tmp_path / "untracked").unlink(missing_ok=True)


def test_a_result_has_its_command(monkeypatch, tmp_path):
    saved = json.loads(stats.save("one", {"figure": 1}, tmp_path).read_text())
    assert saved.keys() == {"machine", "tree", "command", "figure"}
    main = str(stats.ROOT / "bench" / "__main__.py")
    monkeypatch.setattr("sys.argv", [main, "preload", "--rounds", "3", "--tcmalloc", "/usr/lib/one.so"])
    assert stats.command() == "python -m bench preload --rounds 3 --tcmalloc FILE"
    monkeypatch.setattr("sys.argv", [str(stats.ROOT / "bench" / "one.py"), "--out=/tmp/one", "a b"])
    assert stats.command() == "python -m bench.one --out=FILE 'a b'"
    for other in ("/usr/bin/pytest", str(stats.ROOT / ".venv" / "lib" / "pytest" / "__main__.py")):
        monkeypatch.setattr("sys.argv", [other, "tests"])
        assert stats.command() == ""


def test_the_spread_is_the_median_and_the_quartiles():
    assert spread([5, 1, 2, 4, 3]) == {"p25": 2, "p50": 3, "p75": 4}
    with pytest.raises(ValueError, match="data point"):
        spread([])


def test_two_are_compared_pair_by_pair():
    """A slow moment of the machine affects both of a pair."""
    found = compared({"plain": [1, 10, 100], "tls": [2, 20, 200]})
    assert found["ratio"] == {"p25": 2, "p50": 2, "p75": 2}
    assert (found["plain"]["p50"], found["tls"]["p50"]) == (10, 20)
    with pytest.raises(ValueError, match="zip"):
        compared({"plain": [1, 2], "tls": [1, 2, 3]})
