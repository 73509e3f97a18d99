"""Command-line flags made from the configuration tree: one source for flag, environment, YAML key and help.

A flag is its key with dashes, prefixed with the section where the key alone would be unclear.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel

from baton.services.config import (
    ENV_PREFIX,
    GONE,
    SECRET,
    Settings,
    from_text,
    leaves,
    load,
    section_of,
    unknown,
)
from baton.services.models import FLAG, the_one

# (section, key) -> flag, where the key alone would be unclear.
_NAMES = {
    ("scheduler", "address"): "--scheduler",
    ("scheduler", "metrics_port"): "--scheduler-metrics-port",
    ("router", "metrics_port"): "--router-metrics-port",
    ("router", "drain_timeout_s"): "--router-drain-timeout-s",
    ("engine", "extra"): "--engine-args",
    ("router", "frontend"): "--frontend-args",
    ("handoff", "kv_wire_dtype"): "--kv-wire-dtype",
    ("security", "tls"): "--secure",
}
_PREFIXED = {"autoscale", "handoff", "ops", "security", "slo"}

_OF_MODEL = "of_model"

ConfigFlag = Annotated[
    str | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML file with the same keys, by section."),
]


OfModelFlag = Annotated[
    str, typer.Option(FLAG, metavar="NAME", help="The model to use, if the configuration has several.")
]


class Of(Enum):
    """The models that a command applies to, if the configuration has several."""

    WHOLE = "the deployment"
    ONE = "one model, which a flag names"
    ANY = "the model that a flag names, else all"


def with_settings(*names: str, of: Of = Of.WHOLE) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a typer command the flags of `names`, and call it with the loaded `settings`.

    A name is a whole section (`engine`) or one key (`scheduler.address`). The command keeps its other
    parameters. With Of.ONE, the settings are one model's. Invalid values raise ConfigError, or exit with
    status 2 if typer rejects them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        keys = [pair for name in names for pair in _keys(name)]
        flags = [_parameter(section, key) for section, key in keys]
        # eval_str: typer finds no help in an annotation that is still a string.
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters if p.name != "settings"]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given: dict[str, dict[str, Any]] = {}
            for section, key in keys:
                value = values.pop(_variable(section, key))
                if isinstance(value, str):
                    kind = _section(section).model_fields[key].annotation
                    value = from_text(kind, value, flag_name(section, key), (section, key))
                given.setdefault(section, {})[key] = value
            config, name = values.pop("config"), values.pop(_OF_MODEL, "")
            settings: Settings = load(given, config)
            if of is Of.ONE or name:
                settings = the_one(settings, name, f"`baton {command.__name__}`")
            command(settings=settings, **values)

        config_flag = inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFlag
        )
        model_flag = inspect.Parameter(
            _OF_MODEL, inspect.Parameter.KEYWORD_ONLY, default="", annotation=OfModelFlag
        )
        chosen = [] if of is Of.WHOLE else [model_flag]
        signature = inspect.Signature([*own, config_flag, *chosen, *flags])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return run

    return decorate


def flag_name(section: str, key: str) -> str:
    """Return the flag of a key: `--max-model-len` for engine.max_model_len."""
    return _NAMES.get((section, key)) or usual_flag(section, key)


def usual_flag(section: str, key: str) -> str:
    """Return the flag that a key has by the rule in docs/configuration.md, unless it is an exception."""
    dashed = key.replace("_", "-")
    return f"--{section}-{dashed}" if section in _PREFIXED else f"--{dashed}"


def gone(flag: str) -> str:
    """Return what to do about a flag that an earlier version had, or ""."""
    flag = flag.replace("--no-", "--", 1)
    return next((unknown(path) for path in map(_path, GONE) if flag_name(*path) == flag), "")


def _path(name: str) -> tuple[str, str]:
    section, _, key = name.partition(".")
    return section, key


def secret_flags() -> set[str]:
    return {flag_name(section, key) for section, key in SECRET}


def _section(section: str) -> type[BaseModel]:
    model = Settings.model_fields[section].annotation
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise TypeError(f"{section} is not a section of the configuration")
    return model


def _keys(name: str) -> list[tuple[str, str]]:
    """Return the (section, key) pairs of `engine` or `scheduler.address`."""
    section, key = _path(name)
    return [(section, one) for one in ([key] if key else _section(section).model_fields)]


def _variable(section: str, key: str) -> str:
    return f"{section}__{key}"


def _parameter(section: str, key: str) -> inspect.Parameter:
    field = _section(section).model_fields[key]
    default = field.get_default(call_default_factory=True)
    kind = _flag_type(field.annotation)
    name = flag_name(section, key)
    names = [name, f"--no-{name[2:]}"] if kind is bool else [name]
    plain = default not in (None, "", {}) and not isinstance(default, BaseModel)
    shown = f" [default: {_text(default)}]" if plain else ""
    usual = name in {f"--{key.replace('_', '-')}", f"--{section}-{key.replace('_', '-')}"}
    variable = "" if usual else f" [key: {section}.{key}; env: {ENV_PREFIX}{section.upper()}__{key.upper()}]"
    choices = _choices(field.annotation)
    option = typer.Option(
        "/".join(names) if kind is bool else names[0],
        help=f"{field.description or ''}{shown}{variable}".strip(),
        metavar="|".join(choices)
        if choices
        else ("JSON" if kind is str and _is_mapping(field.annotation) else None),
        rich_help_panel=_heading(section),
        show_default=False,
    )
    return inspect.Parameter(
        _variable(section, key),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _heading(section: str) -> str:
    return f"{section.capitalize()} (file: {section}.KEY; env: {ENV_PREFIX}{section.upper()}__KEY)"


def _flag_type(annotation: Any) -> type:
    """Return the type that typer parses; pydantic checks the rest, with better messages."""
    found = leaves(annotation)
    return next((kind for kind in (bool, int, float) if found == {kind}), str)


def _choices(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict or section_of(annotation) is not None


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def warned(warning: str) -> str:
    """Return a warning as a line of the banner, or ""."""
    return f"\n  WARNING:  {warning}\n" if warning else ""


def operator_flags(settings: Settings) -> str:
    """Return the flags that operators' commands need with TLS, or ""."""
    own = settings.security
    if not own.tls:
        return ""
    topic = settings.deployment
    flags = {"--security-ca": own.ca if not own.join else "", "--security-join": own.join, "--topic": topic}
    return " --secure" + "".join(f" {flag} {value}" for flag, value in flags.items() if value)
