"""Identify a model by its files, so that all workers of a deployment can compare their models."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.home import expanded
from baton.services.engine.file_digests import digests
from baton.services.errors import one_line

logger = logging.getLogger(__name__)

# Files that determine what is computed: settings (including those for images), the model's code, weights.
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_SMALL = ("config.json", *_PROCESSOR, "*.index.json", "*quant*.json", "params.json", "*.py")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def model_fingerprint(
    model: str, *, revision: str | None = None, download_dir: str | None = None, hf_token: Any = None
) -> str:
    """Return a hex digest that identifies the model's files. Raises OSError if a file cannot be read.

    For a folder, it covers every byte of settings, code and weights. Weights are read once per machine;
    `file_digests` keeps their digests.

    For a name on Hugging Face's hub, it covers the commit, which determines every byte. The commit comes from
    the hub, like vLLM's, or from the cache if the hub does not answer or is switched off. For other hubs, and
    if the commit is unknown, the digest covers the name and the revision, and a warning is logged. The
    keyword arguments are vLLM's options.
    """
    folder = expanded(model, "engine.model")
    if not folder.is_dir():
        return hashlib.sha256(_name(model, revision, download_dir, hf_token).encode()).hexdigest()
    digest = _settings(folder)
    weights = _matching(folder, _WEIGHTS)
    for path, its in zip(weights, digests(weights), strict=True):
        digest.update(f"{path.name}\0{its}\0".encode())
    return digest.hexdigest()


def processor_fingerprint(model: str, settings: Sequence[Any]) -> str:
    """Return a hex digest of what decides how images are prepared. Raises OSError. settings: vLLM's own."""
    folder = expanded(model, "engine.model")
    digest = _settings(folder) if folder.is_dir() else hashlib.sha256(model.encode())
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _settings(folder: Path) -> hashlib._Hash:
    digest = hashlib.sha256()
    for path in _matching(folder, _SMALL):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def _name(model: str, revision: str | None, download_dir: str | None, hf_token: Any) -> str:
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):  # as vLLM reads it
        why = "it comes from ModelScope"
    else:
        from huggingface_hub import resolve_revision

        try:
            commit = resolve_revision(model, revision=revision, cache_dir=download_dir, token=hf_token)
        except Exception as error:  # noqa: BLE001 (vLLM will report what is wrong)
            why = one_line(error)
        else:
            return f"commit:{model}@{commit.resolved}"
    at = f"{model} at revision {revision or 'main'}"
    logger.warning("the model is identified only by its name, %s: %s", at, why)
    return f"name:{at}"
