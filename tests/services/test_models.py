"""Several models in one configuration."""

import pytest
import yaml

from baton.services.config import load
from baton.services.errors import ConfigError
from baton.services.fleet.supervisor import Fleet, started
from baton.services.models import models_of, the_one

BASE = {
    "engine": {"model": "weights", "dtype": "float32", "extra": {"a": 1}},
    "scheduler": {"address": "127.0.0.1:7400", "metrics_port": 7500},
    "router": {"port": 8123, "max_waiting": 7},
}


@pytest.fixture
def config(tmp_path):
    def load_with(models, **sections):
        file = tmp_path / "baton.yaml"
        given = BASE | sections | {"models": models}
        file.write_text(models if isinstance(models, str) else yaml.safe_dump(given, sort_keys=False))
        return load(config_file=str(file))

    return load_with


def test_without_entries_there_is_one_model():
    settings = load(BASE)
    (one,) = models_of(settings)
    assert (one.settings, one.name, one.prefix) == (settings, "weights", "")
    assert the_one(settings, "") is settings
    assert [str(each.fleet) for each in started(settings, None)] == ["1 prefill + 1 decode"]
    assert [str(each.fleet) for each in started(settings, Fleet(0, 0, 2))] == ["2 mixed"]


def test_an_entry_inherits_and_replaces_whole_keys(config):
    engine = {"model": "other", "extra": {"b": 2}, "speculative_config": {"method": "ngram"}}
    code = {"workers": {"decode": 3}, "engine": engine, "router": {"max_waiting": 3}}
    settings = config({"chat": {"workers": {"mixed": 2, "encode": 1}}, "org/code": code})
    models = models_of(settings)
    assert [(one.name, one.prefix) for one in models] == [("chat", "chat-"), ("org/code", "org-code-")]
    chat, code = [one.settings.engine for one in models]
    assert (chat.model, chat.extra, chat.speculative_config) == ("weights", {"a": 1}, None)
    assert (code.model, code.extra, code.dtype) == ("other", {"b": 2}, "float32")
    assert code.speculative_config is not None
    assert [one.settings.router.max_waiting for one in models] == [7, 3]
    fleets = [str(each.fleet) for each in started(settings, None)]
    assert fleets == ["2 mixed + 1 encode", "1 prefill + 3 decode"]


def test_each_model_has_its_own_scheduler_and_all_have_one_identity(config):
    far = {"scheduler": {"address": "h:1", "topic": "t"}}
    common = {"address": "h:7400,i:7400", "topic": "site", "metrics_port": 7500}
    settings = config({"chat": {}, "code": {}, "far": far}, scheduler=common)
    trees = [one.settings for one in models_of(settings)]
    assert [one.scheduler.topic for one in trees] == ["site.chat", "site.code", "t"]
    assert [one.scheduler.address for one in trees] == ["h:7400,i:7400", "h:7401,i:7401", "h:1"]
    assert [one.scheduler.metrics_port for one in trees] == [7500, 7501, 7502]
    assert {one.deployment for one in [settings, *trees]} == {"site"}
    assert the_one(settings, "code") == trees[1]


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"a": {"engin": {}}}, "unknown key 'models.a.engin'; did you mean 'engine'"),
        ({"a": {"engine": {"modle": "x"}}}, "models.a: unknown key 'engine.modle'; did you mean 'model'"),
        ({"a": {"workers": {"decode": -1}}}, "models.a.workers.decode"),
        ({"a": {"decode": 1}}, "models.a.decode is no longer set: set models.NAME.workers"),
        ({"a": {"engine": {"served_model_name": "b"}}}, "served_model_name: the entry names the model"),
        ({"a": {"router": {"port": 1}}}, "models.a.router.port is about the router's process"),
        ({"a": {"scheduler": {"worker_lease_s": 0}}}, "models.a: scheduler.worker_lease_s"),
        ({"a/b": {}, "a-b": {}}, "'a/b' and 'a-b' both have 'a-b' as the name of processes"),
        (
            {"a": {}, "b": {"scheduler": {"address": "127.0.0.1:7400"}}},
            "'127.0.0.1:7400' as scheduler.address",
        ),
        ({"a": {}, "b": {"scheduler": {"topic": "baton.a"}}}, "'baton.a' as scheduler.topic"),
        ({"a": {"engine": {"lora": {"adapters": {"b": "x"}}}}, "b": {}}, "'b' as the name for requests"),
        (
            {name: {"engine": {"lora": {"adapters": {"law": name}}}} for name in "ab"},
            "'a' and 'b' both have 'law' as the name for requests",
        ),
        ("models:\n  a: {}\n  b: {}\n  a: {}\n", "models.a appears twice"),
        ({"-a": {}}, "models"),
    ],
)
def test_invalid_entries_are_refused_by_name(config, models, said):
    with pytest.raises(ConfigError) as refused:
        models_of(config(models))
    assert said in str(refused.value)


def test_a_secret_of_an_entry_is_not_shown(config):
    with pytest.raises(ConfigError) as refused:
        models_of(config({"a": {"scheduler": {"store": "http://:hunter2@h"}}}))
    assert "models.a: scheduler.store is not allowed" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_command_about_one_model_needs_its_name(config):
    settings = config({"chat": {}, "code": {}})
    with pytest.raises(ConfigError, match=r"name it with --of-model \(chat, code\)"):
        the_one(settings, "")
    with pytest.raises(ConfigError, match="did you mean 'code'"):
        the_one(settings, "cod")
    with pytest.raises(ConfigError, match="has no section 'models'"):
        the_one(load(BASE), "chat")
    with pytest.raises(ConfigError, match=r"models\.NAME\.workers"):
        started(settings, Fleet(1, 1, 0))


def test_models_cannot_be_set_in_the_environment(monkeypatch):
    monkeypatch.setenv("BATON_MODELS", "{}")
    with pytest.raises(ConfigError, match="can only be set in the configuration file"):
        load(BASE)
