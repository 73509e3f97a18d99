"""The host's orders to the connector: `Request.kv_transfer_params`, never set by a client.

A SAVE, or a PREFILL that is handed over, carries `save_params`; a request that loads KV carries
`load_params`; others carry None. The connector reports the outcome as a `Saved` or `Loaded` (reports.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.protos.handoff_pb2 import Manifest

KEY = "baton"  # our entry in kv_transfer_params, in which vLLM looks for its own keys


@dataclass(frozen=True)
class LoadWish:
    """Pull the KV of the request's first `tokens` tokens from another worker."""

    epoch: int
    tokens: int
    manifest: Manifest | None  # the complete prompt's; None: it comes later, with the first token
    saved_as: str = ""  # request id at the source, if different


@dataclass(frozen=True)
class SaveWish:
    """Save the KV of the request's prompt for another worker."""

    epoch: int
    cached: bool = False  # save only if the prefix cache holds the prompt, except for the last block or two
    prefix: LoadWish | None = None  # load the prompt's first tokens before computing the rest


Params = Mapping[str, Any]


def save_params(epoch: int, *, cached: bool = False, prefix: Params | None = None) -> Params:
    return {KEY: SaveWish(epoch, cached, prefix[KEY] if prefix is not None else None)}


def load_params(epoch: int, tokens: int, manifest: Manifest | None = None, saved_as: str = "") -> Params:
    """Order a load; without a manifest, its blocks wait until `begin_load` or `complete_load` brings one."""
    return {KEY: LoadWish(epoch, tokens, manifest, saved_as)}


def wish_of(params: Params | None) -> SaveWish | LoadWish | None:
    wish = params.get(KEY) if params is not None else None
    return wish if isinstance(wish, SaveWish | LoadWish) else None


def asks_for_load(params: Params | None) -> bool:
    """Return whether `kv_transfer_params` ask for a load of the whole prompt."""
    return isinstance(wish_of(params), LoadWish)
