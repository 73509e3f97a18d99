"""A process gets its certificate from the source that the settings name, or does not start."""

import asyncio
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from baton import rpc
from baton.security import identity
from baton.security.errors import AuthorityError, IdentityError, JoinRefused, NotSecured
from baton.security.identity import Identity
from baton.security.join_service import JoinService
from baton.security.names import Name, Role
from baton.services import identities
from baton.services.config import load
from baton.services.errors import ConfigError
from harness.support import PYTHON
from tests.security.conftest import ca as ca

WORKER = Name("baton", Role.WORKER, "w1")


def settings(**security):
    return load({"security": {"tls": True, **security}})


def mine():
    folder = rpc.identity_folder()
    assert folder is not None
    return Identity(folder)


def test_without_tls_there_is_none():
    identities.take_on(load(), Role.ROUTER)
    assert rpc.identity_folder() is None
    with pytest.raises(NotSecured):
        rpc.check_exposure("worker.listen", "0.0.0.0")
    identities.take_on(load({"security": {"insecure": True}}), Role.ROUTER)
    rpc.check_exposure("worker.listen", "0.0.0.0")


def test_from_the_cas_folder(ca):
    identities.take_on(settings(ca=str(ca.folder)), Role.WORKER, "w1")
    assert mine().name == WORKER
    assert oct((mine().folder / identity.KEY).stat().st_mode & 0o777) == "0o600"


def test_without_a_ca_it_does_not_start(tmp_path):
    with pytest.raises(AuthorityError, match="`baton ca init`"):
        identities.take_on(settings(ca=str(tmp_path / "none")), Role.ROUTER)


def test_from_a_folder_that_others_keep(ca, tmp_path):
    given = tmp_path / "given"
    with pytest.raises(IdentityError, match=r"no certificate in .*given"):
        identities.take_on(settings(folder=str(given)), Role.WORKER, "w1")
    identity.write(given, ca.issue(WORKER))
    identities.take_on(settings(folder=str(given)), Role.WORKER, "w1")
    assert rpc.identity_folder() == given
    with pytest.raises(IdentityError, match=r"is for spiffe://baton/baton/worker/w1; this is .*worker/w2"):
        identities.take_on(settings(folder=str(given)), Role.WORKER, "w2")
    other = ca.issue(WORKER)
    (given / identity.KEY).write_bytes(other.key)
    with pytest.raises(IdentityError, match="does not belong to the certificate there"):
        identities.take_on(settings(folder=str(given)), Role.WORKER, "w1")


async def test_by_joining_and_again_from_what_is_kept(ca, tmp_path):
    """The token is for one use, so the second start must use the folder's certificate."""
    token = ca.tokens.add(Role.OPERATOR, "baton", valid_s=60, uses=1, life_s=60, pin=ca.pin)
    file = tmp_path / "token"
    async with JoinService(ca, "baton", "127.0.0.1:0") as service:

        def take_on(**more):
            identities.take_on(settings(join=service.address, **more), Role.OPERATOR)

        with pytest.raises(ConfigError, match=r"security\.token: .*`baton ca token`"):
            await asyncio.to_thread(take_on)
        file.write_text(f"{token}\n")
        for _ in range(2):
            await asyncio.to_thread(take_on, token=f"file:{file}", folder=str(tmp_path / "kept"))
            assert mine().name == Name("baton", Role.OPERATOR)
        with pytest.raises(JoinRefused, match="has no uses left"):
            await asyncio.to_thread(take_on, token=f"file:{file}")


@pytest.mark.parametrize(
    ("key", "section", "values"),
    [
        ("scheduler.address", "scheduler", {"address": "0.0.0.0:7400"}),
        ("worker.listen", "worker", {"listen": "[::]:0"}),
        ("handoff.listen", "handoff", {"listen": "10.0.0.5:0"}),
    ],
)
def test_what_would_listen_in_plain_text_is_named(key, section, values):
    with pytest.raises(NotSecured, match=f"^{key}: .*security.tls.*security.insecure"):
        identities.check(load({section: values}))
    for security in ({"tls": True}, {"insecure": True}):
        identities.check(load({section: values, "security": security}))
    identities.check(load())
    with pytest.raises(NotSecured):  # one of several schedulers
        identities.check(load({"scheduler": {"address": "127.0.0.1:1,0.0.0.0:2"}}))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"join": "ca:7443"}, "join without tls"),
        ({"folder": "x", "token": "y"}, "token and folder without tls"),
        ({"tls": True, "insecure": True}, "exclude each other"),
        ({"tls": True, "token": "x"}, "token without join"),
        ({"tlss": True}, "did you mean 'tls'"),
    ],
)
def test_settings_that_contradict_each_other(values, text):
    with pytest.raises(ConfigError, match=text):
        load({"security": values})


def test_a_folder_goes_when_its_process_went_and_not_before(tmp_path, monkeypatch):
    """The process id may not be visible, as in another container that shares /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from baton.services import identities; print(identities._temporary(), flush=True); input()"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [PYTHON, "-c", code]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as owner:
        theirs = Path(owner.stdout.readline().strip())
        os.utime(theirs, (0, 0))  # an old folder
        ours = identities._temporary()
        assert theirs.is_dir()
        owner.kill()  # no clean exit
    os.utime(theirs, (0, 0))
    os.utime(ours, (0, 0))
    identities._temporary()
    assert not theirs.exists()
    assert ours.is_dir()
