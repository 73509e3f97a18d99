"""Load the configuration from its sources, with one-line errors: key, value, what to do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError

from baton.services.config.fields import OFF, SECRET, Section, leaves
from baton.services.config.tree import Settings, below, keys, section_of, unknown
from baton.services.errors import NOT_YAML, ConfigError

ENV_PREFIX = "BATON_"
ENV_CONFIG_FILE = "BATON_CONFIG"  # names the YAML file, as --config does
Tree = TypeVar("Tree", bound=Settings)
OneSection = TypeVar("OneSection", bound=Section)
_UP_TO_A_VALUE = re.compile(r"[^\w.-]")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_MARK = len("'\\t'")  # a quoted text this short cannot be a secret


def load(
    flags: Mapping[str, Any] | None = None,
    config_file: str | None = None,
    tree: type[Tree] = Settings,  # type: ignore[assignment]
) -> Tree:
    """Read the configuration as `tree`, which is Settings or a subclass with more sections.

    `flags` holds command-line values by section; None means not given. Raises ConfigError with one line that
    names each invalid key, its value unless that may be a secret, and what is allowed.
    """
    name = config_file or os.environ.get(ENV_CONFIG_FILE)
    found = _from_environment(tree)
    found = _merged(_from_file(name), found) if name else found
    for section, values in (flags or {}).items():
        if isinstance(values, Mapping):
            found = _merged(found, {section: {key: one for key, one in values.items() if one is not None}})
        elif values is not None:
            found = _merged(found, {section: values})
    try:
        return tree.model_validate(found)
    except ValidationError as error:
        raise ConfigError("; ".join(_explained(dict(one), tree) for one in error.errors())) from None


def laid_over(section: OneSection, values: Mapping[str, Any], name: str, where: str) -> OneSection:
    """Return a copy of the section `name` with some keys replaced, each as a whole.

    Raises ConfigError, with `where` as the place of the values.
    """
    kind = type(section)
    given = {key: getattr(section, key) for key in kind.model_fields} | dict(values)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found = [dict(one) | {"loc": (name, *one["loc"])} for one in error.errors()]
        raise ConfigError(f"{where}: {'; '.join(_explained(one, Settings) for one in found)}") from None


def from_text(kind: Any, text: str, name: str, path: Sequence[str]) -> Any:
    """Parse the text of the flag or variable `name` for the key at `path`, of type `kind`.

    Mappings are JSON, lists are JSON or comma-separated; anything else is left to pydantic. Raises
    ConfigError.
    """
    shapes = leaves(kind)
    if list in shapes and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if section_of(kind) is None and not shapes & {list, dict, Any}:
        return text
    optional = type(None) in get_args(kind)
    if optional and text.strip().lower() in OFF:
        return "none"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if kind is Any:
            return text
        hidden = len(path) == 1 or tuple(path[:2]) in SECRET  # a whole section may have secrets
        shown = "the value" if hidden else f"value {text!r}"
        raise ConfigError(f"{name}: {shown} is not valid JSON: {error}") from None
    # Unlike a dict, this is not merged with the file's value: keys of another method would remain.
    return MappingProxyType(value) if optional and isinstance(value, dict) else value


def _from_environment(tree: type[Settings]) -> dict[str, Any]:
    """Return the values of environment variables by section. Raises ConfigError for an unknown one."""
    found: dict[str, Any] = {}
    for name in sorted(os.environ):
        if not name.startswith(ENV_PREFIX) or name == ENV_CONFIG_FILE:
            continue
        path = name.removeprefix(ENV_PREFIX).lower().split("__")
        if path[0] == "models":
            raise ConfigError(
                f"environment variable {name}: models can only be set in the configuration file"
            )
        kind: Any = tree
        for depth, part in enumerate(path, 1):
            kind = below(kind, part)
            if kind is None:
                raise ConfigError(f"environment variable {name}: {unknown(path[:depth], tree)}")
        value = from_text(kind, os.environ[name], name, path)
        for part in reversed(path):
            value = {part: value}
        found = _merged(found, value)
    return found


def _from_file(name: str) -> dict[str, Any]:
    """Read a YAML file. Raises ConfigError."""
    what, path = f"configuration file {name!r}", Path(name)
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{what} {why}; pass an existing file with --config")
    try:
        text = path.read_text()
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} cannot be read: {error}") from None
    except (yaml.YAMLError, *NOT_YAML) as error:
        raise ConfigError(f"{what} is not valid YAML: {_where(error)}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(
            f"{what}: it must be a mapping of sections (like 'engine:'), each a mapping of keys"
        )
    if twice := _named_twice(text, "models"):
        raise ConfigError(f"{what}: models.{twice} appears twice: give each model a name of its own")
    return found


def _named_twice(text: str, section: str) -> str:
    """Return the first duplicate key in a section, of which YAML would keep only the last value."""
    root = yaml.compose(text, yaml.SafeLoader)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == section and isinstance(value, yaml.MappingNode):
            names = [one.value for one, _ in value.value]
            return next((name for name in names if names.count(name) > 1), "")
    return ""


def _merged(below: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings recursively; `over` wins."""
    found = dict(below)
    for key, value in over.items():
        old = found.get(key)
        found[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return found


def _explained(one: dict[str, Any], tree: type[Settings]) -> str:
    """Translate one of pydantic's errors."""
    path = [str(part) for part in one["loc"]]
    kind, value, message = one["type"], one["input"], one["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        # If there is no space after the colon, the key includes its value, which may be a secret.
        path[-1] = _UP_TO_A_VALUE.split(path[-1])[0]
        return unknown(path, tree)
    where = ".".join(path)
    if kind == "model_type":
        return f"{where} is a section: it must be a mapping of keys ({', '.join(keys(*path, tree=tree))})"
    if kind == "value_error" and keys(*path, tree=tree):  # about a whole section
        return f"{where}: {message}"
    # A text instead of a mapping may contain a secret, and so may the user or query of a URL.
    plain = isinstance(value, str | int | float) and kind != "dict_type" and tuple(path[:2]) not in SECRET
    if plain and not ("://" in str(value) and {"@", "?"} & set(str(value))):
        return f"{where}: value {value!r} is not allowed: {message}"
    return f"{where} is not allowed: {message}"


def _where(error: Exception) -> str:
    """Return YAML's message and position without quotes from the file, which may be secrets."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return "a value does not match its tag"
    problem = _QUOTED.sub(
        lambda quoted: quoted[0] if len(quoted[0]) <= _MARK or quoted[0][1] == "<" else "'...'",
        getattr(error, "problem", None) or "it cannot be read",
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
