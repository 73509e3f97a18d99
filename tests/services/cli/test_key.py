import pytest
from typer.testing import CliRunner

from baton.errors import BatonError
from baton.services.cli.main import app
from baton.services.tenants.model import SECRET_PREFIX
from harness.scheduling import RedisServer


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"), password="s3cret")
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["file", "redis"])
def run(request, tmp_path, redis):
    topic = f"t-{tmp_path.name}"[-40:].replace("[", "-").replace("]", "-")
    store = ["--keys-store", redis.url, "--topic", topic]
    place = ["--keys-file", str(tmp_path / "keys.yaml")] if request.param == "file" else store

    def command(*words):
        result = CliRunner().invoke(app, ["key", *words, *place], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return command


def test_keys_come_and_go(run):
    secrets = [run("add", "web", "--tenant", "acme", "--requests-per-s", "7"), run("add", "alone")]
    assert all(one.startswith(SECRET_PREFIX) and one.count("\n") == 1 for one in secrets)
    assert run("tenant", "acme", "--tokens-per-min", "9000", "--priority", "3", "--no-cache-salt") == ""
    shown = [line.split() for line in run("list").splitlines()]
    assert ["web", "acme", "7", "-", "-"] in [line[:5] for line in shown]
    assert ["alone", "alone", "-", "-", "-"] in [line[:5] for line in shown]
    assert ["acme", "-", "9000", "-", "3", "shared", "-"] in shown
    assert not any(secret.strip() in run("list") for secret in secrets)
    assert run("remove", "web") == ""
    assert "web" not in run("list")


def test_errors_are_one_line(run):
    run("add", "web")
    for words, said in (
        (("add", "web"), "there is a key 'web' already"),
        (("remove", "wep"), "there is no key 'wep'; did you mean 'web'?"),
        (("add", "a b"), "tenant: String should match pattern"),
        (("tenant", "acme", "--priority", "101"), "priority: Input should be less than or equal to 100"),
    ):
        with pytest.raises(BatonError) as error:
            run(*words)
        assert said in str(error.value)
        assert "\n" not in str(error.value)


def test_it_asks_for_a_place():
    with pytest.raises(BatonError, match="--keys-file FILE or --keys-store"):
        CliRunner().invoke(app, ["key", "list"], catch_exceptions=False)


def test_an_unreachable_redis_is_reported_without_its_password():
    words = ["key", "add", "web", "--keys-store", "redis://:s3cret@127.0.0.1:1/0"]
    with pytest.raises(BatonError, match="no answer") as error:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert "s3cret" not in str(error.value)
