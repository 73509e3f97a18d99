"""Check the arguments of `build_pd_openai_app`, which are those of `ray.serve.llm`, without importing Ray.

Fields that Baton has no use for are ignored, with one warning. Fields that ask for what Baton cannot do raise
ConfigError.

Uses, of Ray 2.60, the fields of PDServingArgs, LLMConfig, ModelLoadingConfig and CloudMirrorConfig. Such
objects are read with `model_dump`; an LLMConfig always has an accelerator_config, which Ray fills in itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from baton.services.config import load, suggest
from baton.services.errors import NOT_YAML, ConfigError
from baton.services.ray.config import SIDES, WORKER_ROLES, ClusterSettings

_ROUTERS = "ingress_deployment_config"
# Keys of Ray's ingress, which is not used; proxy_* are its names in older versions.
_IGNORED = ("ingress_cls_config", "proxy_cls_config", "proxy_deployment_config")
# Fields of LLMConfig for Ray's own server.
_IGNORED_OF_ENGINES = ("log_engine_metrics", "experimental_configs")
_REFUSED = {
    "lora_config": "adapters are loaded at the start, from folders: name them in engine.lora",
    "callback_config": "workers run no callbacks; prepare the model before they start",
    "server_cls": "the server is Baton's own; leave it out",
}
_MIRROR = ("bucket_uri", "extra_files")
_REMOTE = ("s3://", "gs://", "abfss://", "azure://", "pyarrow-")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeArgs:
    """The settings of a Serve application, and Serve's options."""

    settings: ClusterSettings
    options: dict[str, dict[str, Any]]  # keys: prefill, decode, router, and encode if it is given


def read(args: Any) -> ServeArgs:
    """Return the checked arguments. Raises ConfigError."""
    given, ignored = _fields(args, "the arguments"), []
    options = {"router": _fields(given.pop(_ROUTERS, None) or {}, _ROUTERS)}
    for key in _IGNORED:
        if given.pop(key, None):
            ignored.append(key)
    for role in WORKER_ROLES:
        where = f"{role}_config"
        if role not in SIDES and not given.get(where):
            continue
        group = _group(given.get(where) or {}, where)
        options[role] = _options(group.pop("deployment_config", None), f"{where}.deployment_config")
        ignored += [f"{where}.{key}" for key in _without_meaning(group, where)]
        given[where] = group
    if unknown := given.keys() - ClusterSettings.model_fields.keys():
        name = min(map(str, unknown))
        raise ConfigError(f"unknown key {name!r}{suggest(name, [*ClusterSettings.model_fields, _ROUTERS])}")
    if ignored:
        _log.warning("ignored, because Baton has no use for them: %s", ", ".join(ignored))
    settings = load(given, None, ClusterSettings)
    settings.check()
    for role in WORKER_ROLES:
        if (nodes := settings.engine_of(role).nodes) > 1:
            raise ConfigError(
                f"{role}_config.engine_kwargs.nodes (value {nodes}): a replica of Ray Serve is on one node: "
                "use `baton ray up` for more"
            )
    return ServeArgs(settings, options)


def _group(group: Any, where: str) -> dict[str, Any]:
    """Return one side's given fields, from a mapping, an object or a file."""
    if isinstance(group, str | Path):
        try:
            with Path(group).open() as file:
                group = yaml.safe_load(file)
        except OSError as error:
            raise ConfigError(
                f"{where}: cannot read the file {str(error.filename)!r}: {error.strerror}"
            ) from None
        except (yaml.YAMLError, *NOT_YAML):
            raise ConfigError(f"{where}: the file {str(group)!r} is not valid YAML") from None
    return {key: value for key, value in _fields(group, where).items() if value is not None}


def _without_meaning(group: dict[str, Any], where: str) -> Iterator[str]:
    """Remove fields that Baton ignores and yield their names. Raises ConfigError for unsupported ones."""
    for key, why in _REFUSED.items():
        if group.pop(key, None):
            raise ConfigError(f"{where}.{key}: {why}")
    if (engine := group.pop("llm_engine", "vLLM")) != "vLLM":
        raise ConfigError(f"{where}.llm_engine: {engine!r} is not supported; vLLM is")
    kind = _fields(group.pop("accelerator_config", None) or {}, f"{where}.accelerator_config").get(
        "kind", "gpu"
    )
    if kind not in ("gpu", "cpu"):
        raise ConfigError(f"{where}.accelerator_config: {kind!r} is not supported; gpu and cpu are")
    for key in _IGNORED_OF_ENGINES:
        if group.pop(key, None):
            yield key
    if loading := group.get("model_loading_config"):
        loading = group["model_loading_config"] = _fields(loading, f"{where}.model_loading_config")
        _check_source(loading, f"{where}.model_loading_config.model_source")
        if loading.pop("tokenizer_source", None):  # Ray itself ignores this field
            yield "model_loading_config.tokenizer_source (engine_kwargs.tokenizer sets another tokenizer)"


def _check_source(loading: dict[str, Any], where: str) -> None:
    """Convert the model's source to text. Raises ConfigError for a bucket."""
    source = loading.get("model_source")
    if source is not None and not isinstance(source, str):
        mirror = _fields(source, where)
        if unknown := mirror.keys() - _MIRROR:
            name = min(map(str, unknown))
            raise ConfigError(f"{where}: unknown key {name!r}{suggest(name, list(_MIRROR))}")
        buckets = [mirror.get("bucket_uri"), *(one["bucket_uri"] for one in mirror.get("extra_files") or [])]
        source = loading["model_source"] = next(filter(None, buckets), "")
    if source and source.startswith(_REMOTE):
        raise ConfigError(
            f"{where}: models cannot be loaded from a bucket ({source}); put the model into a folder that "
            "every node has, or give its name at Hugging Face"
        )


def _options(given: Any, where: str) -> dict[str, Any]:
    options = {key: value for key, value in _fields(given or {}, where).items() if value is not None}
    if "autoscaling_config" in options:
        options["autoscaling_config"] = _fields(options["autoscaling_config"], f"{where}.autoscaling_config")
    elif options.get("num_replicas") == "auto":
        options["autoscaling_config"] = {}
    return options


def _fields(given: Any, where: str) -> dict[str, Any]:
    """Return a mapping, or an object's given fields, as a dict. Raises ConfigError."""
    if hasattr(given, "model_dump"):
        given = given.model_dump(exclude_unset=True)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: expected a mapping, not {type(given).__name__}")
    return dict(given)
