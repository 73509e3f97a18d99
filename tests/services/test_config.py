"""The configuration: sources of a value, and refusal of invalid ones."""

import pytest
from pydantic import ValidationError

from baton.services.config import REVEAL, Settings, load
from baton.services.errors import ConfigError


@pytest.fixture
def yaml_file(tmp_path):
    return tmp_path / "baton.yaml"


def refusal(file=None):
    with pytest.raises(ConfigError) as error:
        load(config_file=str(file) if file else None)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_flags_override_the_environment_which_overrides_the_file(yaml_file, monkeypatch):
    yaml_file.write_text("router: {port: 1001, host: 0.0.0.0}\nscheduler: {topic: from-file}\n")
    monkeypatch.setenv("BATON_ROUTER__PORT", "1002")
    monkeypatch.setenv("BATON_CONFIG", str(yaml_file))
    settings = load({"router": {"port": 1003, "host": None}})
    assert (settings.router.port, settings.router.host) == (1003, "0.0.0.0")
    assert load().router.port == 1002
    assert load().scheduler.topic == "from-file"
    assert load().handoff.transports is None


def test_environment_variables_have_the_type_of_their_key(yaml_file, monkeypatch):
    yaml_file.write_text(
        "engine: {extra: {a: 1}, speculative_config: {method: ngram, prompt_lookup_max: 3}}\n"
        "scheduler: {policy: {picker: best}}\n"
    )
    for name, value in {
        "HANDOFF__TRANSPORTS": "shm, tcp",
        "FLEET__DEVICES": "[0, 1]",
        "ENGINE__EXTRA__B": '{"c": 2}',
        "ENGINE__SPECULATIVE_CONFIG": '{"method": "mtp"}',
        "ENGINE__ENABLE_PREFIX_CACHING": "false",
        "SCHEDULER": '{"topic": "one", "store": "redis://h"}',
        "SCHEDULER__TOPIC": "two",
        "LOG_FORMAT": "json",
    }.items():
        monkeypatch.setenv(f"BATON_{name}", value)
    settings = load(config_file=str(yaml_file))
    assert settings.handoff.transports == ["shm", "tcp"]
    assert settings.fleet.devices == ["0", "1"]
    assert settings.engine.extra == {"a": 1, "b": {"c": 2}}
    assert settings.engine.speculative_config.prompt_lookup_max is None  # replaced as a whole
    assert not settings.engine.enable_prefix_caching
    assert (settings.scheduler.topic, settings.scheduler.store) == ("two", "redis://h")
    assert (settings.scheduler.policy.picker, settings.log_format) == ("best", "json")
    monkeypatch.setenv("BATON_ENGINE__SPECULATIVE_CONFIG", "none")
    assert load(config_file=str(yaml_file)).engine.speculative_config is None


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fd00::5", "http://[fd00::5]:80"),
        ("front", "http://front:80"),
    ],
)
def test_the_url_of_the_router_on_the_same_machine(host, url):
    assert load({"router": {"host": host, "port": 80}}).router.url == url


def test_an_empty_section_is_the_default(yaml_file):
    yaml_file.write_text("router:\n")
    assert load(config_file=str(yaml_file)).router.port == 8000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("router: {prt: 1}", ["'router.prt'; did you mean 'port'?", "allowed: host, port"]),
        ("routr: {port: 1}", ["'routr'", "'router'", "allowed: engine, scheduler"]),
        ("router: {port: 70000}", ["router.port", "70000", "less than or equal to 65535"]),
        ("router: {port: often}", ["router.port", "'often'", "valid integer"]),
        ("router: {port: yes}", ["router.port", "True", "a number is expected"]),
        (
            "engine: {dtype: float8}",
            ["engine.dtype", "'float8'", "'auto', 'float32', 'bfloat16' or 'float16'"],
        ),
        (
            "handoff: {transports: [pigeon]}",
            ["handoff.transports.0", "'pigeon'", "there are: nixl, shm, tcp"],
        ),
        ("handoff: {transports: []}", ["handoff.transports", "at least 1"]),
        ("scheduler: {policy: {pickr: a}}", ["scheduler.policy.pickr", "'picker'", "allowed: filters"]),
        ("tracing: {slow_ms: 2}", ["tracing.slow_ms is no longer set: it is twice slo.ttft_ms"]),
        ("scheduler: {topic: 'a b'}", ["scheduler.topic", "'a b'", "pattern"]),
        ("scheduler: {heartbeat_s: 4}", ["scheduler.heartbeat_s is no longer set: it is a fifth of"]),
        ("router: [1, 2]", ["router is a section: it must be a mapping of keys (host, port, "]),
        ("router: {port: 1", ["is not valid YAML", "expected ',' or '}'"]),
        ("scheduler: {store: 'foo://x'}", ["use memory, redis://, redis+sentinel:// or redis+cluster://"]),
        ("handoff: {listen: '127.0.0.1:7402,127.0.0.1:7403'}", ["handoff.listen"]),
    ],
)
def test_invalid_keys_and_values_are_refused_by_name(yaml_file, text, said):
    yaml_file.write_text(text)
    found = refusal(yaml_file)
    assert [words for words in said if words not in found] == []


def test_several_schedulers_need_a_shared_store():
    several = {"address": "10.0.0.1:7100,10.0.0.2:7100"}
    load({"scheduler": {**several, "store": "redis://10.0.0.3"}}).scheduler.check_shared()
    with pytest.raises(ConfigError, match=r"set scheduler\.store to the Redis that they share"):
        load({"scheduler": several}).scheduler.check_shared()


def test_a_missing_file_is_named(tmp_path):
    assert "nowhere.yaml' does not exist" in refusal(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("router: {api_keys: c4nary}", "unknown key 'router.api_keys'; did you mean 'api_key'?"),
        ("router: {port: 1, api_key:c4nary}", "unknown key 'router.api_key'"),
        ("api_key: c4nary", "unknown key 'api_key'"),
        ("router: {api_key: [c4nary]}", "router.api_key is not allowed"),
        ("router: {api_key: 0xc4, keys_file: c4nary}", "router.api_key is not allowed"),
        ("router: {api_key: c4nary, keys_file: x}", "router: keys_file and keys_store replace api_key"),
        ("router: {keys_store: c4nary}", "router.keys_store is not allowed: use redis://"),
        ("router: {port: 70000, api_key: c4nary}", "router.port: value 70000"),
        ("router: {port: [c4nary]}", "router.port is not allowed"),
        ("router: 'api_key: c4nary'", "router is a section"),
        ("router:\n  api_key:c4nary", "router is a section"),
        ("scheduler: {store: ['redis://:c4nary@host']}", "scheduler.store is not allowed"),
        ("scheduler: {worker_lease_s: 1.9, store: 'redis://:c4nary@host'}", "scheduler.worker_lease_s"),
        ("scheduler: {worker_lease_s: 0, store: 'redis://:c4nary@host'}", "scheduler.worker_lease_s"),
        (
            "scheduler: {store: 'redis://:c4nary@host?password_file=x'}",
            "scheduler.store is not allowed: a password and a password_file",
        ),
        (
            "router: {keys_store: 'redis://:c4nary@host?password_file=x'}",
            "router.keys_store is not allowed: a password and a password_file",
        ),
        ("engine: {extra: 'hf_token=c4nary'}", "engine.extra is not allowed"),
        ("engine: {extra: [c4nary]}", "engine.extra is not allowed"),
        ("tracing: {endpoint: 'https://me:c4nary@host'}", "tracing.endpoint is not allowed"),
        ("tracing: {endpoint: 'https://host/?key=c4nary'}", "tracing.endpoint is not allowed"),
        ("engine: {speculative_config: {method: mtp, key: c4nary}}", "speculative_config.key"),
        ("router: {api_key: 'c4nary}", "line 1, column 27: found unexpected end of stream"),
        ("router:\n  api_key: *c4nary", "line 2, column 12: found undefined alias"),
        ("router:\n  api_key: !c4nary x", "line 2, column 12: could not determine a constructor"),
        ("router:\n  api_key: c4nary: x", "line 2, column 18: mapping values are not allowed here"),
        ("router:\n  api_key: @c4nary", "line 2, column 12: found character"),
        ("c4nary", "must be a mapping"),
        ("- c4nary", "must be a mapping"),
        ("router: {api_key: !!int c4nary}", "is not valid YAML"),
        ("router: {api_key: c4nary\x00}", "is not valid YAML"),
    ],
)
def test_a_possible_secret_is_not_shown(yaml_file, text, said):
    yaml_file.write_text(text)
    found = refusal(yaml_file)
    assert said in found
    assert "c4nary" not in found


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ROUTER__PORTT", "1", "unknown key 'router.portt'; did you mean 'port'"),
        ("ROUTR__PORT", "1", "unknown key 'routr'; did you mean 'router'"),
        ("CLASSES__OWN__SHARES", "1", "unknown key 'classes.own.shares'; did you mean 'share'"),
        ("ENGINE__SEED", "1", "engine.seed is no longer set: set engine.extra.seed"),
        ("ROUTER", "api_key=c4nary", "BATON_ROUTER: the value is not valid JSON"),
        ("ROUTER__APIKEY", "c4nary", "did you mean 'api_key'?"),
        ("ENGINE__EXTRA", '{"hf_token": "c4nary"', "BATON_ENGINE__EXTRA: the value is not valid"),
        ("SCHEDULER", '{"store": ["redis://:c4nary@host"]}', "scheduler.store is not allowed"),
    ],
)
def test_an_invalid_environment_variable_is_refused_without_its_value(monkeypatch, name, value, said):
    monkeypatch.setenv(f"BATON_{name}", value)
    found = refusal()
    assert said in found
    assert "c4nary" not in found


SECRETS = {
    "router": {"api_key": "c4nary"},
    "scheduler": {"store": "redis://:c4nary@host"},
    "engine": {"extra": {"hf_token": "c4nary"}},
}


def test_dumps_contain_secrets_only_on_request():
    settings = load(SECRETS)
    for shown in (repr(settings), str(settings), str(settings.router), f"{settings.router.api_key}"):
        assert "c4nary" not in shown
    assert "c4nary" not in settings.router.model_dump_json()
    there = Settings(**settings.model_dump(mode="json", context=REVEAL))
    assert there.router.api_key.get_secret_value() == "c4nary"
    assert (there.scheduler.store, there.engine.extra) == ("redis://:c4nary@host", {"hf_token": "c4nary"})
    with pytest.raises(ValidationError) as error:
        settings.scheduler.store = ["redis://:c4nary@host"]
    assert "c4nary" not in str(error.value)


@pytest.mark.parametrize(("given", "names"), [("a,b", ["a", "b"]), ("", []), ("[a, '']", ["a"]), ("[]", [])])
def test_a_model_has_one_name_or_several(yaml_file, given, names):
    yaml_file.write_text(f"engine: {{served_model_name: {given if given[:1] == '[' else repr(given)}}}")
    assert load({}, yaml_file).engine.served_model_name == names
