"""Which model this is, told from its files: the same on every worker of a deployment."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLES = 16  # places in each weight file that are looked at
_SAMPLE_BYTES = 4096
_HEADER_LIMIT = 100 << 20  # bytes: the most that safetensors allows


def model_fingerprint(model: str) -> str:
    """Hex of a hash over the configuration, the weight files' headers and sizes, and samples of the weights.

    Quick (milliseconds, whatever the model's size), so it tells fine-tunes apart only where a sample
    differs: 16 places of 4 KiB a file. A model that is not a folder here is named by its name alone:
    its files come from a hub, at a revision that the name decides.
    Raises OSError when a file cannot be read.
    """
    digest = hashlib.sha256()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        digest.update(f"name:{model}".encode())
        return digest.hexdigest()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.index.json")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        _weights(path, digest)
    return digest.hexdigest()


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
