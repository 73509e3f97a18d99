import re
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from baton.services.cli import main
from baton.services.cli.flags import flag_name, with_settings
from baton.services.config import Settings
from baton.services.errors import ConfigError


def run(*arguments):
    seen = []
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @with_settings("engine", "router", "scheduler", "handoff", "worker")
    def command(settings: Settings, own: Annotated[int, typer.Option()] = 0) -> None:
        seen.append(settings)

    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_a_flag_reaches_its_key():
    settings = run(
        *("--port", "9", "--model", "m", "--max-model-len", "64", "--handoff-transports", "tcp,shm"),
        *("--engine-args", '{"swap": 1}', "--no-enable-prefix-caching", "--scheduler", "h:1", "--own", "3"),
    )
    assert (settings.router.port, settings.engine.model) == (9, "m")
    assert (settings.engine.max_model_len, settings.engine.extra) == (64, {"swap": 1})
    assert settings.engine.enable_prefix_caching is False
    assert (settings.handoff.transports, settings.scheduler.address) == (["tcp", "shm"], "h:1")


def test_wrong_values_name_the_key():
    with pytest.raises(ConfigError, match="--engine-args: the value is not valid JSON"):
        run("--engine-args", "x")
    with pytest.raises(ConfigError, match=r"--speculative-config: value '\{x' is not valid JSON"):
        run("--speculative-config", "{x")
    with pytest.raises(ConfigError, match=r"handoff\.transports\.0: value 'pigeon'"):
        run("--handoff-transports", "pigeon")


def test_flags_of_earlier_versions_say_what_to_do_instead():
    for command, flag in (("router", "--max-attempts=2"), ("up", "--no-metrics-open"), ("mixed", "--seed")):
        result = CliRunner().invoke(main.app, [command, flag, "1"])
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception).startswith(f"{flag.partition('=')[0]}: ")
        assert "is no longer set: " in str(result.exception)
    assert "--seed" in help_of("tune")


def test_no_two_keys_share_a_flag():
    sections = ("engine", "router", "scheduler", "handoff", "worker")
    names = [
        flag_name(section, key)
        for section in sections
        for key in Settings.model_fields[section].annotation.model_fields
    ]
    assert len(names) == len(set(names))


def help_of(*command):
    result = CliRunner().invoke(main.app, [*command, "--help"])
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("command", ["up", "batch", "router", "scheduler", "decode", "status", "role"])
def test_help_lists_every_flag_under_its_section(command):
    """The command's own flags come first, then those of each section under a heading."""
    text = help_of(command)
    headings = re.findall(r"^(\w+)(?: \(file: (\w+)\.KEY; env: BATON_(\w+)__KEY\))?:", text, re.MULTILINE)
    sections = [section for _, section, _ in headings if section]
    assert sections == sorted(set(sections), key=sections.index)
    assert [name for name, section, _ in headings if not section] in (
        ["Usage", "Options"],
        ["Usage", "Arguments", "Options"],
    )
    assert text.index("\nOptions:") < text.index("(file: ")
    assert "..." not in text.replace("{...}", "")


def test_operators_commands_need_only_the_address_and_who_asks():
    for command in ("status", "drain", "undrain", "role"):
        text = help_of(command)
        assert "--scheduler " in text
        assert "BATON_SCHEDULER__ADDRESS" in text
        assert set(re.findall(r"--[a-z-]+", text)) <= {
            "--scheduler",
            "--config",
            "--help",
            "--json",
            "--of-model",
            "--watch",
            *("--topic", "--secure", "--no-secure"),
            *(f"--security-{key}" for key in ("ca", "join", "token", "folder")),
        }
        assert len(text.splitlines()) < 50


def test_no_line_in_the_list_of_commands_is_truncated():
    assert "..." not in help_of().partition("Commands:")[2]
