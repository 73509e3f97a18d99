"""The commands `baton ca ...`: a CA, its service, and a scheduler that joins from another folder."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.security.authority import Authority
from baton.security.names import Role
from harness.support import BATON, CALL_S, eventually, free_port


def baton(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BATON, *command], capture_output=True, text=True, timeout=CALL_S, check=False)


@contextmanager
def running(log: Path, said: str, *command: str) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen([BATON, *command], stdout=out, stderr=subprocess.STDOUT)
    try:
        eventually(lambda: said in log.read_text(), 60, f"{command[:2]} says {said!r}: {log.read_text()}")
        yield
        process.terminate()
        assert process.wait(CALL_S) == 0
    finally:
        process.kill()
        process.wait(10)


def test_from_an_empty_folder_to_a_status_over_tls(tmp_path: Path) -> None:
    ca, join = f"--security-ca={tmp_path / 'ca'}", f"127.0.0.1:{free_port()}"
    scheduler = f"127.0.0.1:{free_port()}"
    made = baton("ca", "init", ca)
    assert made.returncode == 0, made.stderr
    authority = Authority(tmp_path / "ca")
    tokens = {"operator": baton("ca", "token", "--role=operator", ca).stdout}
    for role in ("scheduler", "router"):
        tokens[role] = str(
            authority.tokens.add(Role(role), "baton", valid_s=600, uses=1, life_s=600, pin=authority.pin)
        )
    for role, text in tokens.items():
        (tmp_path / role).touch(0o600)
        (tmp_path / role).write_text(text)

    def secure(role: str) -> tuple[str, ...]:
        own = f"--security-token-file={tmp_path / role}"
        return "--secure", f"--security-join={join}", own, f"--scheduler={scheduler}"

    with (
        running(tmp_path / "ca.log", "listens on", "ca", "serve", f"--listen={join}", ca),
        running(tmp_path / "scheduler.log", "scheduler of topic", "scheduler", *secure("scheduler")),
    ):
        plain = baton("status", f"--scheduler={scheduler}")
        assert plain.returncode == 1
        assert "security.tls" in plain.stderr
        wrong = baton("status", *secure("router"))
        assert wrong.returncode == 1
        assert "is for a router of topic 'baton', not for an operator" in wrong.stderr
        shown = baton("status", *secure("operator"))
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "(no worker)" in shown.stdout
        listed = baton("ca", "tokens", ca).stdout.splitlines()
        assert sorted(line.split()[1] for line in listed) == ["operator", "router", "scheduler"]
        assert sum("0 uses left" in line for line in listed) == 2
        revoked = listed[0].split(" ")[0]
        assert baton("ca", "revoke", revoked, ca).returncode == 0
        assert revoked not in authority.tokens.all()
        name = "spiffe://baton/baton/router"
        assert f"{name} is revoked" in baton("ca", "revoke", name, ca).stdout
        assert f"{name}  since " in baton("ca", "revoked", ca).stdout
        assert list(authority.revoked.all()) == [revoked, name]
        wrong = baton("ca", "revoke", "router", ca)
        assert wrong.returncode == 1
        assert "neither a token's id" in wrong.stderr
