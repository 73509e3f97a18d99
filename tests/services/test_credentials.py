"""Keys and passwords in files: their format, and the errors for unusable files."""

import logging

import pytest
import yaml

from baton.services import credentials
from baton.services.cli.up import _banner
from baton.services.config import RouterSettings, SchedulerSettings, Settings, load
from baton.services.errors import ConfigError
from baton.services.models import models_of
from harness.support import ROOT


@pytest.fixture
def file(tmp_path):
    made = tmp_path / "secret"
    made.touch(0o600)
    return made


def keys(path):
    return RouterSettings(api_key=f"file:{path}")


def store(path):
    return f"redis://host:6379/0?password_file={path}"


def test_every_line_is_a_key(file, caplog):
    file.write_text("\ufeff# new\n one \n\n\t# old\ntwo\r\n")
    assert credentials.api_keys(keys(file)) == ["one", "two"]
    assert not caplog.records


def test_precedence_of_keys(file, monkeypatch):
    file.write_text("of-the-file")
    assert credentials.api_keys(RouterSettings()) == []
    monkeypatch.setenv("VLLM_API_KEY", "stock")
    assert credentials.api_keys(RouterSettings()) == ["stock"]
    assert credentials.api_keys(keys(file)) == ["of-the-file"]
    assert credentials.api_keys(load({"router": {"api_key": "own"}}).router) == ["own"]
    monkeypatch.setenv("VLLM_API_KEY", "")
    monkeypatch.setenv("BATON_ROUTER__API_KEY", "")
    assert credentials.api_keys(load().router) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "contains no key"),
        (b"\n# c4nary\n", "contains no key"),
        (b"# x\nc4nary # of today", "line 2 of"),
        (b"\xffc4nary", "not a text file"),
    ],
)
def test_a_file_without_a_key_is_refused(file, text, said):
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"^router\.api_key: ") as error:
        credentials.check(Settings(router=keys(file)))
    assert said in str(error.value)
    assert str(file) in str(error.value)
    assert "c4nary" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path):
    for path, said in ((tmp_path / "nowhere", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=rf"router\.api_key: cannot read .*{said}"):
            credentials.api_keys(keys(path))
        with pytest.raises(ConfigError, match=rf"scheduler\.store: cannot read .*{said}"):
            credentials.store_password(SchedulerSettings(store=store(path)))
        with pytest.raises(ConfigError, match=rf"router\.keys_store: cannot read .*{said}"):
            credentials.check(Settings(router=RouterSettings(keys_store=store(path))))


def test_a_file_readable_by_all_is_warned_of(file, caplog):
    file.write_text("c4nary")
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING, credentials.__name__):
        assert credentials.api_keys(keys(file)) == ["c4nary"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(file) in record.getMessage()
    assert "c4nary" not in record.getMessage()


def test_the_stores_password(file):
    file.write_text("#a b\n")
    assert credentials.store_password(SchedulerSettings(store=store(file))) == "#a b"
    assert credentials.store_password(SchedulerSettings()) == ""
    assert credentials.keys_store_password(RouterSettings(keys_store=store(file))) == "#a b"
    assert credentials.keys_store_password(RouterSettings()) == ""


@pytest.mark.parametrize("text", ["", "\n", "c4nary\nc4nary\n"])
def test_a_password_is_one_line(file, text):
    file.write_text(text)
    for settings in ({"scheduler": {"store": store(file)}}, {"router": {"keys_store": store(file)}}):
        with pytest.raises(ConfigError, match="on one line") as error:
            credentials.check(Settings(**settings))
        assert "c4nary" not in str(error.value)


def test_a_file_of_tenants_keys_is_checked_before_anything_starts(tmp_path):
    file = tmp_path / "keys.yaml"
    settings = Settings(router=RouterSettings(keys_file=str(file)))
    for text, said in ((None, "No such file"), ("keys: {a: {tenant: t}}", "keys.a.sha256: Field required")):
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=said) as error:
            credentials.check(settings)
        assert "router.keys_file" in str(error.value)
    file.write_text(f"keys: {{a: {{tenant: t, sha256: {'a' * 64}}}}}")
    credentials.check(settings)
    assert credentials.guarded(settings.router)


@pytest.mark.parametrize(
    ("host", "key", "open_"),
    [
        *(("0.0.0.0", "", True), ("::", "", True), ("192.0.2.1", "", True)),
        *(("127.0.0.1", "", False), ("::1", "", False), ("localhost", "", False), ("0.0.0.0", "k", False)),
    ],
)
def test_a_router_that_is_open_to_all_is_reported(host, key, open_, monkeypatch):
    settings = load({"router": {"host": host, "api_key": key}})
    said = credentials.open_to_all(settings.router)
    assert (host in said and "no key is needed" in said) if open_ else not said
    assert bool(_banner(settings, models_of(settings)).count("WARNING")) is open_
    monkeypatch.setenv("VLLM_API_KEY", "stock")  # this key also guards the router
    assert not credentials.open_to_all(settings.router)


def test_compose_publishes_the_router_on_this_machine_alone():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    for name, service in compose["services"].items():
        for port in service.get("ports", []):
            assert port.startswith(("127.0.0.1:", "${ADDRESS:-127.0.0.1}:")), name
    assert compose["services"]["router"]["environment"]["BATON_ROUTER__API_KEY"] == "${API_KEY:-}"


def test_a_secret_without_a_path_is_refused():
    with pytest.raises(ConfigError, match=r"router\.api_key: write a path after file:"):
        credentials.api_keys(RouterSettings(api_key="file:"))
