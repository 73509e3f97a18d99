"""Flags are made from the configuration tree."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from baton.services.cli import main
from baton.services.cli.flags import flag_name, with_settings
from baton.services.config import Settings
from baton.services.errors import ConfigError


def run(*arguments: str) -> Settings:
    """Parse `arguments` as a command with every section would."""
    seen: list[Settings] = []
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @with_settings("engine", "router", "scheduler", "handoff", "worker")
    def command(settings: Settings, own: Annotated[int, typer.Option()] = 0) -> None:
        seen.append(settings)

    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_a_flag_reaches_its_key() -> None:
    settings = run(
        *("--port", "9", "--model", "m", "--max-model-len", "64", "--handoff-transports", "grpc,shm"),
        *("--engine-args", '{"swap": 1}', "--no-enable-prefix-caching", "--scheduler", "h:1", "--own", "3"),
    )
    assert settings.router.port == 9
    assert settings.engine.model == "m"
    assert settings.engine.max_model_len == 64
    assert settings.engine.extra == {"swap": 1}
    assert settings.engine.enable_prefix_caching is False
    assert settings.handoff.transports == ["grpc", "shm"]
    assert settings.scheduler.address == "h:1"


def test_wrong_values_name_the_key() -> None:
    with pytest.raises(ConfigError, match="--engine-args: the value is not valid JSON"):
        run("--engine-args", "x")
    with pytest.raises(ConfigError, match=r"handoff\.transports\.0: value 'pigeon'"):
        run("--handoff-transports", "pigeon")


def test_no_two_keys_share_a_flag() -> None:
    sections = ("engine", "router", "scheduler", "handoff", "worker")
    names = [
        flag_name(section, key)
        for section in sections
        for key in Settings.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "command", ["up", "router", "scheduler", "prefill", "decode", "mixed", "status", "drain"]
)
def test_help_tells_every_flag(command: str) -> None:
    result = CliRunner().invoke(main.app, [command, "--help"])
    assert result.exit_code == 0
    assert "--scheduler" in result.output
    assert "BATON_SCHEDULER__ADDRESS" in result.output
