"""Read and check a deployment's LoRA adapters from their folders, before vLLM is imported.

A folder has PEFT's layout: adapter_config.json, and the weights as safetensors or in PyTorch's format. vLLM
silently accepts an adapter whose matrices are smaller than the model's and fills only part of its buffers, so
this module compares the shapes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from baton.home import expanded
from baton.services.config import EngineSettings
from baton.services.errors import ConfigError

# The values of max_lora_rank that vLLM takes.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_MOST_AT_ONCE = 8  # default maximum of adapters in a batch
_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # vLLM's order
_CHUNK = 1 << 20  # bytes
# For example `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
_PART = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
_LAYER = re.compile(r".*?\blayers\.\d+\.")
# vLLM's arguments that change what an adapter computes, or in which precision.
_MEANING = ("lora_dtype", "lora_target_modules", "enable_moe_shared_loras")


Shape = list[int]


@dataclass(frozen=True)
class AdapterFiles:
    name: str
    path: str
    fingerprint: str  # hex digest of the files and of the settings that change their meaning


def check_adapters(engine: EngineSettings) -> None:
    """Check the adapters' folders without reading their weights. Raises ConfigError."""
    _checked(engine)


def read_adapters(engine: EngineSettings) -> tuple[AdapterFiles, ...]:
    """Return the adapters, sorted by name, with fingerprints of all their bytes. Raises ConfigError."""
    meaning = {key: engine.extra.get(key) for key in _MEANING}
    found = []
    for name, path, _ in _checked(engine):
        try:
            found.append(AdapterFiles(name, str(path), _fingerprint(path, meaning)))
        except OSError as error:
            raise _refused(name, path, f"cannot be read: {error}") from None
    return tuple(found)


def lora_args(engine: EngineSettings) -> dict[str, Any]:
    """Return vLLM's engine arguments, with room to keep all adapters loaded. Raises ConfigError."""
    settings = engine.lora
    if settings is None:
        return {}
    ranks = [rank for _, _, rank in _checked(engine)]
    highest = max(ranks)
    at_once = settings.max_loras or min(len(ranks), _MOST_AT_ONCE)
    return {
        "enable_lora": True,
        "max_lora_rank": next(room for room in RANKS if room >= highest),
        "max_loras": at_once,
        "max_cpu_loras": max(len(ranks), at_once),
    }


def _checked(engine: EngineSettings) -> list[tuple[str, Path, int]]:
    settings = engine.lora
    if settings is None:
        return []
    files = sorted(expanded(engine.model, "engine.model").glob("*.safetensors"))
    matrices = {name: shape for file in files for name, shape in _matrices(file)}
    paths = {
        name: expanded(settings.adapters[name], f"engine.lora.adapters.{name}")
        for name in sorted(settings.adapters)
    }
    return [(name, path, _check(engine, name, path, matrices)) for name, path in paths.items()]


def _check(engine: EngineSettings, name: str, path: Path, matrices: Mapping[str, Shape]) -> int:
    if name in (engine.served_model_name or [Path(engine.model).name]):
        raise _refused(name, path, "it has the name of the model itself: give it another")
    if not path.is_dir():
        here = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise _refused(name, path, f"the folder does not exist{here}")
    if not (path / _CONFIG).is_file():
        raise _refused(name, path, f"the folder holds no {_CONFIG}: it is no adapter in PEFT's layout")
    if (weights := _weights_of(path)) is None:
        raise _refused(name, path, f"the folder holds no weights ({' or '.join(_WEIGHTS)})")
    try:
        config = json.loads((path / _CONFIG).read_text())
        rank = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise _refused(name, path, f"its {_CONFIG} names no rank (r)") from None
    if rank > RANKS[-1]:
        raise _refused(name, path, f"its rank is {rank}, and vLLM takes at most {RANKS[-1]}")
    if problem := _other_model(matrices, weights):
        made_for = config.get("base_model_name_or_path")
        for_what = f" (it was made for {made_for!r})" if made_for else ""
        raise _refused(name, path, f"it does not fit the model {engine.model!r}{for_what}: {problem}")
    return rank


def _other_model(matrices: Mapping[str, Shape], weights: Path) -> str:
    """Describe the first mismatch between an adapter and the model's plain matrices; "" if none is found."""
    if not matrices or weights.suffix != ".safetensors":
        return ""
    layers = {found[0] for name in matrices if (found := _LAYER.match(name))}
    for name, shape in _matrices(weights):
        if (part := _PART.fullmatch(name)) is None:
            continue
        module = part["module"]
        layer, base = _LAYER.match(module), matrices.get(f"{module}.weight")
        if layer and layers and layer[0] not in layers:
            return f"the model has no {layer[0].rstrip('.')}"
        end = 1 if part["which"] == "A" else 0  # A is [rank, in], B is [out, rank], the model's [out, in]
        if base and shape[end] != base[end]:
            side = "inputs" if end else "outputs"
            return f"its {module} has {shape[end]} {side}, the model's {base[end]}"
    return ""


def _matrices(file: Path) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of each float matrix of a file; nothing if it is not a safetensors file."""
    try:
        with safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                part = opened.get_slice(name)
                if len(part.get_shape()) == 2 and part.get_dtype().startswith(("F", "BF")):
                    yield name, part.get_shape()
    except (OSError, SafetensorError):
        return


def _weights_of(path: Path) -> Path | None:
    return next((path / name for name in _WEIGHTS if (path / name).is_file()), None)


def _fingerprint(path: Path, meaning: Mapping[str, Any]) -> str:
    weights = _weights_of(path)
    digest = hashlib.sha256(json.dumps(meaning, sort_keys=True, default=str).encode())
    for file in filter(None, (path / _CONFIG, weights)):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:32]


def _refused(name: str, path: Path, why: str) -> ConfigError:
    return ConfigError(f"engine.lora.adapters.{name} (value {str(path)!r}): {why}")
