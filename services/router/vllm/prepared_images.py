"""Take prepared images out of vLLM's requests, and name images alike in all routers.

vLLM's name of an image covers the model's path, which may differ between routers; here a digest of the
settings replaces it. A request's images are prepared one after another, so that those beyond its limit are
never prepared: SmolVLM makes 60 MB of an image of any size.

Leans on: vllm.multimodal.processing.context.BaseProcessingInfo.model_id, which BaseMultiModalProcessor hashes
with each item; BaseMultiModalProcessor._cached_apply_hf_processor, which fills inputs.cache;
vllm.multimodal.inputs.MultiModalFeatureSpec (data, identifier, mm_position);
vllm.v1.engine.EngineCoreRequest.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.multimodal.processing.context import BaseProcessingInfo
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from baton.services.engine import wire
from baton.services.engine.fingerprint import processor_fingerprint
from baton.services.engine.images import MODALITY, MOST_BYTES, metadata_of
from baton.services.engine.patches.replace import replace as replace_function
from baton.services.router.errors import TooLarge, Unsupported
from baton.services.router.images import Image

_DIGEST = re.compile("[0-9a-f]+")
_names: dict[str, str] = {}  # keyed by the model's path, which the values replace in the names of images


def name_images(model_config: Any) -> None:
    """Name the images of a model by its settings instead of its path. Raises OSError."""
    if model_config.is_multimodal_model:
        settings = (
            model_config.multimodal_config.mm_processor_kwargs,
            *(model_config.hf_overrides, model_config.revision, str(model_config.dtype)),
        )
        _names[model_config.model] = processor_fingerprint(model_config.model, settings)
        BaseProcessingInfo.model_id = property(_model_id)
        replace_function(BaseMultiModalProcessor, "_cached_apply_hf_processor", _one_by_one)


def _model_id(self: Any) -> str:
    path: str = self.ctx.model_config.model
    return _names.get(path, path)


def _one_by_one(original: Any, self: Any, inputs: Any, timing_ctx: Any) -> Any:
    """Prepare each image alone, into the cache, before all images are taken from it. Raises ValueError."""
    images = inputs.mm_data_items.get(MODALITY, ())
    if inputs.cache is not None and len(images) > 1:
        sizes: dict[str, int] = {}
        for image in images.get_all_items_for_hash():
            alone = self.info.parse_mm_data({MODALITY: [image]}, validate=False)
            made = original(self, replace(inputs, mm_data_items=alone, mm_uuid_items=None), timing_ctx)
            (name,), (item,) = made.hashes[MODALITY], made.kwargs[MODALITY]
            sizes[name] = sum(_size(field.data) for field in item.values())
            if (size := sum(sizes.values())) > MOST_BYTES:
                raise ValueError(_too_large(f"the first {len(sizes)} images", size))
    return original(self, inputs, timing_ctx)


def places(features: Iterable[Any]) -> tuple[range, ...]:
    spans = (feature.mm_position for feature in features)
    return tuple(range(span.offset, span.offset + span.length) for span in spans)


def _size(data: Any) -> int:
    return sum(map(_size, data)) if isinstance(data, list | tuple) else getattr(data, "nbytes", 0)


class PreparedImages:
    """The images of a router's requests. Requests with the same image share it."""

    def __init__(self) -> None:
        self._images: WeakValueDictionary[str, Image] = WeakValueDictionary()

    async def split(
        self, features: Sequence[Any], prompt: Sequence[int]
    ) -> tuple[list[Any], tuple[Image, ...]]:
        """Return the features of a prompt's tokens as metadata, and their images, one per feature.

        Raises TooLarge or Unsupported. The loop gets a turn after every 4 MiB that are copied.
        """
        if any(one.data is None or one.modality != MODALITY for one in features):
            raise Unsupported("only text and images are served here")
        if any(not _DIGEST.fullmatch(one.identifier.rpartition(":")[2]) for one in features):
            raise Unsupported("an image has a name that is not a hash of its file")  # vLLM's number for it
        different = {one.identifier: one for one in features}
        size = sum(_size(field.data) for one in different.values() for field in one.data.values())
        _check(size)
        images = {name: await self._image(one, prompt) for name, one in different.items()}
        _check(sum(image.size for image in images.values()))
        return [metadata_of(one) for one in features], tuple(images[one.identifier] for one in features)

    async def _image(self, feature: Any, prompt: Sequence[int]) -> Image:
        image = self._images.get(feature.identifier)
        if image is None:
            joined = io.BytesIO()
            for piece in wire.encode_item(feature.data):
                joined.write(piece)
                await asyncio.sleep(0)
            tokens = feature.mm_position.length
            alone = wire.encode_request(_alone(feature, prompt))
            made = Image(feature.identifier, joined.getvalue(), tokens, alone)  # getvalue: no copy
            image = self._images.setdefault(feature.identifier, made)  # another may have been made meanwhile
        return image


def _alone(feature: Any, prompt: Sequence[int]) -> EngineCoreRequest:
    """Return a request with an image's own tokens and its metadata, for an encode worker."""
    place = feature.mm_position
    own = list(prompt[place.offset : place.offset + place.length])
    alone = [replace(metadata_of(feature), mm_position=replace(place, offset=0))]
    return wire.new_request("image", own, SamplingParams(max_tokens=1), mm_features=alone, arrival_time=0.0)


def _check(size: int) -> None:
    if size > MOST_BYTES:
        raise TooLarge(_too_large("the request's images", size))


def _too_large(images: str, size: int) -> str:
    return (
        f"{images} take {size / (1 << 20):.1f} MiB once prepared; {MOST_BYTES >> 20} are allowed: send fewer "
        "or smaller ones"
    )
