"""vLLM variables that would undo the isolation of clients prevent a start."""

import pytest

from baton.services.config import EngineSettings
from baton.services.engine.args import check_model
from baton.services.engine.isolation import REFUSED, RESPONSES_STORE, is_set
from baton.services.errors import ConfigError
from harness.support import ROOT


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return EngineSettings(model=str(tmp_path))


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("value", ["1", "true"])
def test_variables_are_refused_by_name(settings, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"environment variable {name}={value}: .*; unset it"):
        check_model(settings)


@pytest.mark.parametrize("name", REFUSED)
def test_variables_may_be_off(settings, monkeypatch, name):
    for value in ("", "0", "False"):
        monkeypatch.setenv(name, value)
        check_model(settings)


def test_vllm_reads_each_variable():
    from vllm import envs

    for name in (*REFUSED, RESPONSES_STORE):
        assert name in envs.environment_variables
        assert not is_set(name)


def test_the_page_has_each_variable():
    page = (ROOT / "docs" / "security.md").read_text()
    for name in (*REFUSED, RESPONSES_STORE):
        assert f"`{name}`" in page
