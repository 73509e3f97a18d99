"""The host's orders to the connector: `Request.kv_transfer_params`, never set by a client.

A PREFILL or a SAVE carries `save_params`, a DECODE with a handoff `load_params`, any other request None. The
connector parses them; it answers with the `Saved` and `Loaded` of reports.py. The package's docstring shows
the whole way.
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
    """`kv_transfer_params` that ask for a save. Plain data: vLLM passes it on unseen."""

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
    """Pull the KV of this request's first tokens from another worker. Answered by a `Loaded`."""

    epoch: int
    tokens: int
    manifest: Manifest | None  # describes the complete prompt; None: it comes later, with the first token
    saved_as: str = ""  # the request id under which the source saves it; empty: this one's own


@dataclass(frozen=True)
class SaveWish:
    """Keep this request's KV for another worker when its prompt has been prefilled. Answered by a `Saved`."""

    epoch: int
    cached: bool = False  # only if the prefix cache already holds it, except for the last block or two
    prefix: LoadWish | None = None  # load of its first tokens, pulled before


Wish = SaveWish | LoadWish


def save_params(epoch: int, *, cached: bool = False, prefix: LoadParams | None = None) -> SaveParams:
    """Return parameters that make attempt `epoch` at a request save its KV.

    cached: only if it is here already; prefix: the load of its first tokens
    """
    params: SaveParams = {"baton": "save", "epoch": epoch, "cached": cached}
    if prefix is not None:
        params["prefix"] = prefix
    return params


def load_params(epoch: int, tokens: int, manifest: Manifest | None = None, saved_as: str = "") -> LoadParams:
    """Return parameters that make attempt `epoch` at a request load the KV of its first tokens.

    manifest: of the complete prompt, whose first token the request has; without it room is reserved, and
    `BatonConnector.begin_load` and `complete_load` bring the rest. saved_as: the request id under which it is
    saved, if different
    """
    serialized = manifest.SerializeToString() if manifest is not None else b""
    return {"baton": "load", "epoch": epoch, "tokens": tokens, "manifest": serialized, "saved_as": saved_as}


def parse(params: Mapping[str, Any] | None) -> Wish | None:
    """Return the wish in `kv_transfer_params`; None without one. Raises InvalidWish."""
    if params is None or _KEY not in params:
        return None
    kind, epoch = params[_KEY], params.get("epoch")
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
        raise InvalidWish(f"kv_transfer_params: epoch is {epoch!r}; a number from 0 on is needed")
    if kind == "save":
        prefix = parse(params.get("prefix"))
        if isinstance(prefix, SaveWish):
            raise InvalidWish("kv_transfer_params: the prefix of a save is a load, not a save")
        return SaveWish(epoch, bool(params.get("cached")), prefix)
    if kind != "load":
        raise InvalidWish(f"kv_transfer_params: {_KEY!r} is {kind!r}; allowed: 'save', 'load'")
    tokens = params.get("tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InvalidWish(f"kv_transfer_params: tokens is {tokens!r}; a number from 1 on is needed")
    try:
        serialized = params.get("manifest", b"")
        manifest = Manifest.FromString(serialized) if serialized != b"" else None
        return LoadWish(epoch, tokens, manifest, str(params.get("saved_as", "")))
    except (DecodeError, TypeError) as error:
        raise InvalidWish(f"kv_transfer_params: the manifest cannot be parsed: {error}") from None


def asks_for_load(found: Mapping[str, Any] | None) -> bool:
    """Return whether a request's `kv_transfer_params` ask for a load of all its prompt."""
    return found is not None and found.get(_KEY) == "load"
