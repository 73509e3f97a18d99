"""Images in requests for the engine: whole, or only their metadata, but never with `data` None.

A prepared image is large (6 MB per megapixel for Qwen2.5-VL). A worker that gets the prompt's KV needs only a
few hundred bytes of an image: its name, its place, and the fields for positions (M-RoPE), which vLLM marks
`keep_on_cpu`.

Leans on: vllm.multimodal.inputs.{MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from baton.handoff.embeddings import Embeddings

MODALITY = "image"
MOST_BYTES = 256 << 20  # limit of one request's prepared images
MOST_EMBEDDING_BYTES = 512 << 20  # limit of the embeddings that one request brings

FindImage = Callable[[str], Any]  # takes a name; returns the prepared image, its Embeddings, or None


def metadata_of(feature: Any) -> Any:
    """Return the feature with only the fields that an engine needs if it does not compute the image."""
    from vllm.multimodal.inputs import MultiModalKwargsItem  # routers import this module before vLLM

    kept = {name: field for name, field in feature.data.items() if field.field.keep_on_cpu}
    return replace(feature, data=MultiModalKwargsItem(kept))


def problem(features: Sequence[Any], prompt: int) -> str:
    """Return why the features of a prompt of `prompt` tokens are refused, or ""."""
    end = 0
    for feature in features:
        place = feature.mm_position
        if feature.modality != MODALITY:
            return f"{feature.modality} is not served, only text and images"
        if feature.data is None or not feature.identifier:
            return "an image comes without metadata or without a name"
        if place.length < 1 or place.offset < end or place.offset + place.length > prompt:
            return (
                f"an image has the tokens from {place.offset} on, {place.length} of them: they overlap the "
                f"image before, or the prompt's end at {prompt}"
            )
        if place.is_embed is not None and tuple(place.is_embed.shape) != (place.length,):
            return (
                f"the mask of an image of {place.length} tokens has the shape {tuple(place.is_embed.shape)}"
            )
        end = place.offset + place.length
    return ""


def whole(features: Sequence[Any], find: FindImage) -> tuple[list[Any], str]:
    """Return the features with the images that have arrived, and the name of the first missing one, or ""."""
    found, missing = [], ""
    for feature in features:
        item = find(feature.identifier)
        if isinstance(item, Embeddings):
            found.append(feature)
        elif item is None or any(item.get(name) != field for name, field in feature.data.items()):
            found.append(feature)
            missing = missing or feature.identifier
        else:
            found.append(replace(feature, data=item))
    return found, missing


def before(features: Sequence[Any], tokens: int) -> list[Any] | None:
    """Return the features in a prompt's first `tokens` tokens; None if these end inside an image."""
    kept = [one for one in features if one.mm_position.offset < tokens]
    last = kept[-1].mm_position if kept else None
    return None if last is not None and last.offset + last.length > tokens else kept
