"""Keep a request without its images from ending the engine.

After a handoff an engine has an image's KV and metadata, but not its pixels. If it must compute that part of
the prompt again (the request was preempted, or its blocks were lost), vLLM would fail in the step, with all
requests in it. vLLM asks its connector for encoder outputs before each step of such a request. This one has
none to offer, and ends the request with an error: the router then sends it again with its images.

Leans on: vllm.distributed.ec_transfer.ec_connector.base.ECConnectorBase, vllm.v1.request.Request (request_id,
mm_features).
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata

IMAGE_LOST = "baton_image_lost"  # attribute of a Request that was given up: the image's name


class BatonECConnector(ECConnectorBase):
    """vLLM's encoder connector of a worker that takes images."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self._lost: set[str] = set()  # requests to end

    # -- in the scheduler

    def has_cache_item(self, identifier: str) -> bool:
        del identifier
        return False

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Return whether all images behind the computed tokens are here; otherwise the request ends."""
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset + place.length <= num_computed_tokens or is_whole(feature):
                continue
            setattr(request, IMAGE_LOST, feature.identifier)
            self._lost.add(request.request_id)
            return False
        return True

    def take_unavailable_requests(self) -> set[str]:
        lost, self._lost = self._lost, set()
        return lost

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Do nothing: the engine computes all encoder outputs itself."""

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        del scheduler_output
        return ECConnectorMetadata()

    # -- in the ranks

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Do nothing."""

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """Do nothing."""


def is_whole(feature: Any) -> bool:
    """Return whether a feature has its image, and not only the fields for positions."""
    return feature.data is not None and any(not field.field.keep_on_cpu for field in feature.data.values())
