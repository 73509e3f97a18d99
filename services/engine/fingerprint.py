"""The identity of a model, from its files: the same on every worker of a deployment."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from baton.home import expanded
from baton.services.errors import one_line

logger = logging.getLogger(__name__)

_SAMPLES = 16  # places in each weight file that are hashed
_SAMPLE_BYTES = 4096
_HEADER_LIMIT = 100 << 20  # bytes: the most that safetensors allows


def model_fingerprint(
    model: str, *, revision: str | None = None, download_dir: str | None = None, hf_token: Any = None
) -> str:
    """Return a hash in hex that identifies the model's files; the options are vLLM's, for one from a hub.

    For a folder it covers the configuration, the weight files' headers and sizes, and samples of the weights.
    It is quick (milliseconds, whatever the model's size), so it tells fine-tunes apart only where a sample
    differs: 16 places of 4 KiB a file.
    For a name at Hugging Face's hub it covers the commit that the name stands for, which decides every byte.
    The hub is asked, as vLLM does; offline, or where it does not answer, the cache is. Elsewhere, and where
    the commit is not known, it covers the name and the revision, and the log says so.
    Raises OSError when a file cannot be read.
    """
    digest = hashlib.sha256()
    folder = expanded(model, "engine.model")
    if not folder.is_dir():
        digest.update(_name(model, revision, download_dir, hf_token).encode())
        return digest.hexdigest()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.index.json")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        _weights(path, digest)
    return digest.hexdigest()


def _name(model: str, revision: str | None, download_dir: str | None, hf_token: Any) -> str:
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):  # as vLLM reads it
        why = "it comes from ModelScope"
    else:
        from huggingface_hub import resolve_revision

        try:
            commit = resolve_revision(model, revision=revision, cache_dir=download_dir, token=hf_token)
        except Exception as error:  # noqa: BLE001 (its client raises much; vLLM will say what is wrong)
            why = one_line(error)
        else:
            return f"commit:{model}@{commit.resolved}"
    at = f"{model} at revision {revision or 'main'}"
    logger.warning("the model is told from others by its name alone, %s: %s", at, why)
    return f"name:{at}"


def _weights(path: Path, digest: hashlib._Hash) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        start = 0
        if path.suffix == ".safetensors" and size >= 8:
            header = int.from_bytes(file.read(8), "little")
            if header <= min(size, _HEADER_LIMIT):
                digest.update(file.read(header))
                start = 8 + header
        room = max(0, size - start - _SAMPLE_BYTES)
        for sample in range(_SAMPLES):
            file.seek(start + room * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
