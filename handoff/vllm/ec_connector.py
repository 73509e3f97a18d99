"""Baton's encoder connector: it passes images' embeddings between vLLM and the worker's host.

Embeddings that the host has pulled come with the request, as its attribute EMBEDDINGS, and stay with it,
because a preempted request needs them again. The scheduler's side offers them to vLLM, which loads them in
the step that needs them. After a handoff an engine has neither pixels nor embeddings of an image. If it
had to compute that part of the prompt again, vLLM would fail in the step; so the connector ends the request,
with an error, and the router resends it with its images. In an encode worker's engine, the rank's side puts
embeddings on the shelf.

Leans on: vllm.distributed.ec_transfer (get_ec_transfer, has_ec_transfer) and its
ec_connector.base.ECConnectorBase; vllm.v1.request.Request (request_id, mm_features), which Scheduler.schedule
passes to ensure_cache_available before it calls has_cache_item and update_state_after_alloc, all before
build_connector_meta; SchedulerOutput.scheduled_new_reqs[].mm_features; ECTransferConfig.{is_encode_only,
mm_encoder_output_widths, ec_connector_extra_config}; ModelConfig.{dtype, hf_config, quantization};
current_platform.device_type.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import vllm
from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.platforms import current_platform

from baton.handoff.compatibility import embeddings_hash
from baton.handoff.config import HandoffConfig
from baton.handoff.embeddings import Embeddings, Form
from baton.handoff.errors import StagingFull
from baton.handoff.save.shelf import Shelf

logger = logging.getLogger(__name__)

IMAGE_LOST = "baton_image_lost"  # attribute of a Request that was given up: the image's name
EMBEDDINGS = "baton_embeddings"  # attribute of a Request: dict of Embeddings by the image's name
MODALITY = "image"


@dataclass
class StepImages(ECConnectorMetadata):
    loads: dict[str, Embeddings] = field(default_factory=dict)  # to load, by name
    new: list[str] = field(default_factory=list)  # names of the new requests' images, in an encode worker


class BatonECConnector(ECConnectorBase):
    """vLLM makes one object for the scheduler and one per rank."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        transfer = vllm_config.ec_transfer_config
        self._encodes = transfer.is_encode_only
        self._lost: set[str] = set()  # requests to end
        self._offered: dict[str, Embeddings] = {}  # this step's embeddings, keyed by image
        self._step = StepImages()
        self.shelf: Shelf | None = None  # in the rank of an encode worker
        if self._encodes and role == ECConnectorRole.WORKER:
            config = HandoffConfig.from_extra_config(transfer.ec_connector_extra_config)
            self.shelf = Shelf(config, form_of(vllm_config, config.model_fingerprint).compatibility_hash)

    def shutdown(self) -> None:
        if self.shelf is not None:
            self.shelf.close()

    # -- in the scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Return whether all images after the computed tokens are available; otherwise the request ends."""
        brought: dict[str, Embeddings] = getattr(request, EMBEDDINGS, {})
        for feature in request.mm_features:
            place, name = feature.mm_position, feature.identifier
            if place.offset + place.length <= num_computed_tokens:
                continue
            if name in brought:
                self._offered[name] = brought[name]
            elif not is_whole(feature):
                setattr(request, IMAGE_LOST, name)
                self._lost.add(request.request_id)
                return False
        return True

    def take_unavailable_requests(self) -> set[str]:
        lost, self._lost = self._lost, set()
        return lost

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self._offered

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        name = request.mm_features[index].identifier
        if (offered := self._offered.get(name)) is not None:
            self._step.loads[name] = offered

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        step, self._step, self._offered = self._step, StepImages(), {}
        if self._encodes:
            new = scheduler_output.scheduled_new_reqs
            step.new = [feature.identifier for one in new for feature in one.mm_features]
        return step

    # -- in the ranks

    def start_load_caches(self, encoder_cache: dict[str, Any], **_: Any) -> None:
        step = cast(StepImages, self._get_connector_metadata())
        for name, one in step.loads.items():
            encoder_cache[name] = _tensor(one)

    def start_save_caches(self, **kwargs: Any) -> None:
        """Put embeddings that vLLM still has back on the shelf, because it does not compute them again."""
        if self.shelf is not None:
            cache, step = kwargs["encoder_cache"], cast(StepImages, self._get_connector_metadata())
            for name in step.new:
                if name in cache:
                    self.save_caches(cache, name)

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **_: Any) -> None:
        """Put an image's embeddings on the shelf. If there is no room, its request notices later."""
        if self.shelf is not None:
            try:
                self.shelf.put(mm_hash, _bytes(encoder_cache[mm_hash]))
            except StagingFull as error:
                logger.warning("%s", error)


def is_whole(feature: Any) -> bool:
    """Return whether a feature has its image, and not only the fields for positions."""
    return feature.data is not None and any(not field.field.keep_on_cpu for field in feature.data.values())


def form_of(vllm_config: Any, model_fingerprint: str) -> Form:
    """Return the form of a model's embeddings; its width is 0 until vLLM has measured it."""
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    digest = embeddings_hash(
        vllm.__version__, model.hf_config.to_dict(), model_fingerprint, dtype, str(model.quantization or "")
    )
    width = (vllm_config.ec_transfer_config.mm_encoder_output_widths or {}).get(MODALITY, 0)
    return Form(digest, width, dtype)


def shelf_of(vllm_config: Any) -> Shelf | None:
    """Return the shelf of the loaded engine in this process; None unless it is an encode worker's."""
    found: Shelf | None = get_ec_transfer().shelf if has_ec_transfer() else None
    if found is not None:
        found.row_bytes = form_of(vllm_config, "").row_bytes
    return found


def _tensor(embeddings: Embeddings) -> torch.Tensor:
    """Return the embeddings on the rank's device: [rows, width]."""
    data = torch.from_numpy(np.require(embeddings.data, requirements=("A", "W")))  # may be read-only
    values = data.view(getattr(torch, embeddings.dtype)).view(embeddings.rows, embeddings.width)
    return values.to(current_platform.device_type)


def _bytes(tensor: torch.Tensor) -> Embeddings:
    """Return a tensor [rows, width] as bytes, which may share its memory."""
    rows, width = tensor.shape
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return Embeddings(data, rows, width, str(tensor.dtype).removeprefix("torch."))
