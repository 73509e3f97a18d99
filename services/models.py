"""Split the configuration into models, each with a tree of settings for its processes.

Without `models:` there is one model with the whole tree. With `models:`, each entry overrides keys of the
top-level sections, and each model has its own scheduler and topic in the store. Only routers serve several
models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton import addresses
from baton.services.config import ModelSettings, RouterSettings, Settings, laid_over, suggest
from baton.services.engine.args import served_model_name, served_names
from baton.services.errors import ConfigError

FLAG = "--of-model"
# Keys of `router` about requests to one model; the others are about the router's process.
_ROUTER = ("chat_template", "flush_ms", "frontend", "max_waiting", "request_timeout_s")
_SECTIONS = ("engine", "scheduler", "worker", "handoff", "autoscale", "slo", "router")
_NOT_IN_A_WORD = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class Model:
    """One model of a deployment. `entry` is its value under `models:`, if that section exists."""

    settings: Settings
    entry: ModelSettings | None = None

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return served_model_name(self.settings.engine)

    @property
    def names(self) -> list[str]:
        """All names in the API: the model's, its aliases, and its adapters."""
        return served_names(self.settings.engine)

    @property
    def prefix(self) -> str:
        """The prefix of the names of its processes; empty without `models:`."""
        return f"{_word(self.name)}-" if self.entry is not None else ""

    def with_settings(self, change: Callable[[Settings], Settings]) -> Model:
        return Model(change(self.settings), self.entry)


def models_of(settings: Settings) -> Sequence[Model]:
    """Return the models in the order of the configuration.

    Raises ConfigError for an invalid entry, or if two share a name or an address.
    """
    if not settings.models:
        return (Model(settings),)
    found = [_model(settings, *item, place) for place, item in enumerate(settings.models.items())]
    _tell_apart(found, "the name of processes", lambda one: [_word(one.name)])
    _tell_apart(found, "scheduler.topic", lambda one: [one.settings.scheduler.topic])
    _tell_apart(found, "scheduler.address", lambda one: _listed(one.settings.scheduler.address))
    _tell_apart(found, "the name for requests", lambda one: one.names)
    return found


def the_one(settings: Settings, name: str, what: str = "this command") -> Settings:
    """Return the settings of the named model; `name` may be empty if only one is configured.

    Raises ConfigError; `what` names the caller in its message.
    """
    if not settings.models:
        if name:
            raise ConfigError(f"{FLAG} {name}: the configuration has no section 'models'; leave it out")
        return settings
    if not name:
        raise ConfigError(
            f"{what} needs one of several models: name it with {FLAG} ({', '.join(settings.models)})"
        )
    if name not in settings.models:
        raise ConfigError(f"{FLAG} {name}: there is no such model{suggest(name, list(settings.models))}")
    return next(one.settings for one in models_of(settings) if one.name == name)


def _model(base: Settings, name: str, entry: ModelSettings, place: int) -> Model:
    given: dict[str, dict[str, Any]] = {section: dict(getattr(entry, section)) for section in _SECTIONS}
    where = f"models.{name}"
    further = given["engine"].get("served_model_name", [])
    if not isinstance(further, list):
        raise ConfigError(f"{where}.engine.served_model_name: the entry names the model; list further names")
    for key in given["router"]:
        if key in RouterSettings.model_fields and key not in _ROUTER:
            raise ConfigError(
                f"{where}.router.{key} is about the router's process: set router.{key} at the top; "
                f"the keys of one model are {', '.join(_ROUTER)}"
            )
    own = base.scheduler
    given["engine"]["served_model_name"] = [name, *further]
    given["scheduler"] = {
        "topic": f"{own.topic}.{_word(name)}",
        "address": ",".join(_further(one, place) for one in own.address.split(",")),
        "metrics_port": own.metrics_port and own.metrics_port + place,
        **given["scheduler"],
    }
    sections = {
        section: laid_over(getattr(base, section), values, section, where)
        for section, values in given.items()
    }
    security = base.security.model_copy(update={"topic": base.deployment})
    return Model(base.model_copy(update={**sections, "security": security, "models": {}}), entry)


def _further(address: str, places: int) -> str:
    """Return the address with its port increased by `places`, unless the port is 0 (any free port)."""
    host, port = addresses.split(address.strip())
    return addresses.join(host, port and port + places)


def _word(name: str) -> str:
    """Return a model's name as it is used in names of processes, topics and certificates."""
    return _NOT_IN_A_WORD.sub("-", name)


def _listed(address: str) -> list[str]:
    """Return the addresses that have a fixed port, which two schedulers cannot share."""
    return [one.strip() for one in address.split(",") if addresses.split(one)[1]]


def _tell_apart(models: Iterable[Model], what: str, values: Callable[[Model], Iterable[Hashable]]) -> None:
    """Raise ConfigError if two models share one of the values."""
    owner: dict[Hashable, str] = {}
    for one in models:
        for value in values(one):
            if (other := owner.setdefault(value, one.name)) != one.name:
                raise ConfigError(
                    f"models: {other!r} and {one.name!r} both have {value!r} as {what}: give each its own"
                )
