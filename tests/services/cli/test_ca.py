import itertools
from contextlib import contextmanager

from baton.security.authority import Authority
from baton.security.names import Role
from harness.support import CALL_S, eventually, free_port
from harness.zygote import shared

_numbers = itertools.count()


def started(folder, *command):
    return shared().baton(f"command-{next(_numbers)}", list(command), folder)


def baton(folder, *command):
    process = started(folder, *command)
    return process.wait(CALL_S), process.text


@contextmanager
def running(folder, said, *command):
    process = started(folder, *command)
    try:
        eventually(lambda: said in process.text, 60, f"{command[:2]} says {said!r}: {process.text}")
        yield
        process.terminate()
        assert process.wait(CALL_S) == 0
    finally:
        process.kill()


def test_from_an_empty_folder_to_a_status_over_tls(tmp_path):
    ca, join = f"--security-ca={tmp_path / 'ca'}", f"127.0.0.1:{free_port()}"
    scheduler = f"127.0.0.1:{free_port()}"
    code, said = baton(tmp_path, "ca", "init", ca)
    assert code == 0, said
    authority = Authority(tmp_path / "ca")
    tokens = {"operator": baton(tmp_path, "ca", "token", "--role=operator", ca)[1]}
    for role in ("scheduler", "router"):
        tokens[role] = str(
            authority.tokens.add(Role(role), "baton", valid_s=600, uses=1, life_s=600, pin=authority.pin)
        )
    for role, text in tokens.items():
        (tmp_path / role).touch(0o600)
        (tmp_path / role).write_text(text)

    def secure(role):
        own = f"--security-token=file:{tmp_path / role}"
        return "--secure", f"--security-join={join}", own, f"--scheduler={scheduler}"

    with (
        running(tmp_path, "listens on", "ca", "serve", f"--listen={join}", ca),
        running(tmp_path, "scheduler of topic", "scheduler", *secure("scheduler")),
    ):
        code, said = baton(tmp_path, "status", f"--scheduler={scheduler}")
        assert code == 1
        assert "security.tls" in said
        code, said = baton(tmp_path, "status", *secure("router"))
        assert code == 1
        assert "is for a router of topic 'baton', not for an operator" in said
        shown = shared().command("status", *secure("operator"))
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "(no worker)" in shown.stdout
        listed = baton(tmp_path, "ca", "tokens", ca)[1].splitlines()
        assert sorted(line.split()[1] for line in listed) == ["operator", "router", "scheduler"]
        assert sum("0 uses left" in line for line in listed) == 2
        revoked = listed[0].split(" ")[0]
        assert baton(tmp_path, "ca", "revoke", revoked, ca)[0] == 0
        assert revoked not in authority.tokens.all()
        name = "spiffe://baton/baton/router"
        assert f"{name} is revoked" in baton(tmp_path, "ca", "revoke", name, ca)[1]
        assert f"{name}  since " in baton(tmp_path, "ca", "revoked", ca)[1]
        assert list(authority.revoked.all()) == [revoked, name]
        code, said = baton(tmp_path, "ca", "revoke", "router", ca)
        assert code == 1
        assert "neither a token's id" in said
