"""Users without a home folder, as in containers."""

import pwd
from pathlib import Path

import pytest

from baton.home import NoHome, expanded
from baton.services import identities
from baton.services.config import load
from baton.services.credentials import keys_in
from baton.services.diagnosis import local
from baton.services.engine.args import check_model


@pytest.fixture
def unknown(monkeypatch):
    """Act as a user without a passwd entry and without HOME."""

    def missing(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", missing)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)


def test_a_path_in_a_missing_home(unknown):
    with pytest.raises(NoHome, match=r"security\.ca: '~/\.baton/ca' needs a home folder, and this user"):
        expanded("~/.baton/ca", "security.ca")
    assert expanded("/etc", "security.ca") == Path("/etc")


def test_no_setting_with_a_path_ends_in_a_traceback(unknown):
    settings = load({"security": {"tls": True}, "engine": {"model": "~/model"}})
    with pytest.raises(NoHome, match=r"security\.ca"):
        identities._issued(settings.security, identities.Name("baton", identities.Role.OPERATOR))
    with pytest.raises(NoHome, match=r"engine\.model"):
        check_model(settings.engine)
    with pytest.raises(NoHome, match=r"router\.api_key"):
        keys_in("router.api_key", "~/keys")
    (model,) = local._model(settings)
    assert "engine.model: '~/model' needs a home folder" in model.what
