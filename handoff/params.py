"""What a request asks of the connector: `kv_transfer_params` as the worker host sets them, never a client.

PREFILL: `save_params(epoch)`; DECODE with a handoff: `load_params(epoch, manifest)`; anything else: None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from baton.handoff.errors import InvalidWish
from baton.protos.handoff_pb2 import Manifest

_KEY = "baton"
_SAVE = "save"
_LOAD = "load"


@dataclass(frozen=True)
class SaveWish:
    """Keep this request's KV for another worker when its prompt has been read."""

    epoch: int


@dataclass(frozen=True)
class LoadWish:
    """Pull this request's KV from where the manifest says."""

    epoch: int
    manifest: Manifest


Wish = SaveWish | LoadWish


def save_params(epoch: int) -> dict[str, Any]:
    """`Request.kv_transfer_params` for the attempt `epoch` at reading a prompt."""
    return {_KEY: _SAVE, "epoch": epoch}


def load_params(epoch: int, manifest: Manifest) -> dict[str, Any]:
    """`Request.kv_transfer_params` for going on from what `manifest` describes."""
    return {_KEY: _LOAD, "epoch": epoch, "manifest": manifest.SerializeToString()}


def parse(params: Mapping[str, Any] | None) -> Wish | None:
    """The wish in `kv_transfer_params`; None without one. Raises InvalidWish."""
    if params is None or _KEY not in params:
        return None
    kind, epoch = params[_KEY], params.get("epoch")
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
        raise InvalidWish(f"kv_transfer_params: epoch is {epoch!r}; a number from 0 on is needed")
    if kind == _SAVE:
        return SaveWish(epoch)
    if kind != _LOAD:
        raise InvalidWish(f"kv_transfer_params: {_KEY!r} is {kind!r}; allowed: {_SAVE!r}, {_LOAD!r}")
    try:
        return LoadWish(epoch, Manifest.FromString(params.get("manifest", b"")))
    except (DecodeError, TypeError) as error:
        raise InvalidWish(f"kv_transfer_params: the manifest cannot be read: {error}") from None
