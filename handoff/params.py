"""The host's orders to the connector: `Request.kv_transfer_params`, never set by a client.

A PREFILL or a SAVE carries `save_params`, a DECODE with a handoff `load_params`, any other request None. The
connector reports the outcome as a `Saved` or `Loaded` (reports.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from google.protobuf.message import DecodeError

from baton.handoff.errors import InvalidWish
from baton.protos.handoff_pb2 import Manifest

_KEY = "baton"


class SaveParams(TypedDict):
    """`kv_transfer_params` that ask for a save."""

    baton: Literal["save"]
    epoch: int
    cached: bool
    prefix: NotRequired[LoadParams]


class LoadParams(TypedDict):
    """`kv_transfer_params` that ask for a load."""

    baton: Literal["load"]
    epoch: int
    tokens: int
    manifest: bytes  # serialized; empty: not here yet
    saved_as: str


@dataclass(frozen=True)
class LoadWish:
    """Pull the KV of the request's first `tokens` tokens from another worker."""

    epoch: int
    tokens: int
    manifest: Manifest | None  # of the complete prompt; None: it comes later, with the first token
    saved_as: str = ""  # request id at the source, if different


@dataclass(frozen=True)
class SaveWish:
    """Save the KV of the request's prompt for another worker."""

    epoch: int
    cached: bool = False  # only if the prefix cache holds it, except for the last block or two
    prefix: LoadWish | None = None  # load its first tokens before computing the rest


Wish = SaveWish | LoadWish


def save_params(epoch: int, *, cached: bool = False, prefix: LoadParams | None = None) -> SaveParams:
    """Return the parameters of a `SaveWish`."""
    params: SaveParams = {"baton": "save", "epoch": epoch, "cached": cached}
    if prefix is not None:
        params["prefix"] = prefix
    return params


def load_params(epoch: int, tokens: int, manifest: Manifest | None = None, saved_as: str = "") -> LoadParams:
    """Return the parameters of a `LoadWish`.

    Without a manifest, blocks are reserved until `BatonConnector.begin_load` or `complete_load` brings one.
    """
    serialized = manifest.SerializeToString() if manifest is not None else b""
    return {"baton": "load", "epoch": epoch, "tokens": tokens, "manifest": serialized, "saved_as": saved_as}


def parse(params: Mapping[str, Any] | None) -> Wish | None:
    """Parse `kv_transfer_params`; None without a wish. Raises InvalidWish."""
    if params is None or _KEY not in params:
        return None
    kind, epoch = params[_KEY], params.get("epoch")
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
        raise InvalidWish(f"kv_transfer_params: epoch is {epoch!r}; it must be a number from 0 on")
    if kind == "save":
        prefix = parse(params.get("prefix"))
        if isinstance(prefix, SaveWish):
            raise InvalidWish("kv_transfer_params: the prefix of a save must be a load, not a save")
        return SaveWish(epoch, bool(params.get("cached")), prefix)
    if kind != "load":
        raise InvalidWish(f"kv_transfer_params: {_KEY!r} is {kind!r}; allowed: 'save', 'load'")
    tokens = params.get("tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InvalidWish(f"kv_transfer_params: tokens is {tokens!r}; it must be a number from 1 on")
    try:
        serialized = params.get("manifest", b"")
        manifest = Manifest.FromString(serialized) if serialized != b"" else None
        return LoadWish(epoch, tokens, manifest, str(params.get("saved_as", "")))
    except (DecodeError, TypeError) as error:
        raise InvalidWish(f"kv_transfer_params: the manifest cannot be parsed: {error}") from None


def asks_for_load(found: Mapping[str, Any] | None) -> bool:
    """Return whether `kv_transfer_params` ask for a load of the whole prompt."""
    return found is not None and found.get(_KEY) == "load"
