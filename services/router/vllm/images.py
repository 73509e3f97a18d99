"""Give vLLM the images that the door has admitted, and nothing else: vLLM itself fetches and decodes no file.

The images are kept in the request's Admission until its first sequence is added.

Leans on: vllm.multimodal.media.{MEDIA_CONNECTOR_REGISTRY, MediaConnector (load_from_url, load_from_url_async,
which all its fetch_* call but those of embeddings), MediaWithBytes}; VLLM_MEDIA_CONNECTOR; that
ImageMediaIO.load_bytes sets io_config where it has converted an image, as the names of images in caches
depend on it; OpenAIServingResponses.msg_store and the requests' previous_response_id.
"""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaWithBytes

from baton.services.errors import StartError
from baton.services.router.errors import RequestFailed, Unsupported
from baton.services.router.http.admission import current_admission
from baton.services.router.media import parts
from baton.services.router.media.decoder import BACKGROUND
from baton.services.router.media.door import MediaDoor
from baton.services.router.vllm.engine_client import refusal

_NAME = "baton"
_ONLY_TEXT = "images are not served here, only text is (docs/limits.md)"


async def admit_images(request: Any, door: MediaDoor | None, handler: Any = None) -> None:
    """Admit a request's images once; a request converted from another API's already has them.

    `door`: None if the model takes no images. `handler`: vLLM's, which may store earlier messages. Raises
    RefusedByRouter.
    """
    admission = current_admission.get()
    if admission is not None and admission.images is not None:
        return
    try:
        found = parts.images(request, among=_earlier(request, handler))
        if admission is None or door is None:
            if found:
                raise Unsupported(f"{found[0].place}: {_ONLY_TEXT}")
            return
        party = admission.party
        admission.images = {}
        admission.images = await door.admit(found, party.holder, admission.deadline)
    except RequestFailed as error:
        raise refusal(error) from None


def drop_images() -> None:
    """Drop the current request's images, once they are rendered."""
    if admission := current_admission.get():
        admission.images = {}


def use_admitted_images(model_config: Any) -> None:
    """Make vLLM take images from the door. Raises StartError for options about reading them."""
    multimodal = model_config.multimodal_config
    if multimodal is not None and multimodal.media_io_kwargs:
        raise StartError(
            "engine.extra.media_io_kwargs is not for you to set: images are read as RGB, on white"
        )
    if _NAME not in MEDIA_CONNECTOR_REGISTRY.name2class:
        MEDIA_CONNECTOR_REGISTRY.register(_NAME)(_Admitted)
    envs.VLLM_MEDIA_CONNECTOR = _NAME


def _earlier(request: Any, handler: Any) -> dict[str, Any]:
    earlier = getattr(request, "previous_response_id", None)
    return {"previous_response_id": getattr(handler, "msg_store", {}).get(earlier)} if earlier else {}


class _Admitted(MediaConnector):
    async def fetch_image_async(self, image_url: str, *, image_mode: str | None = "RGB") -> Any:
        admission = current_admission.get()
        found = (admission.images or {}).get(image_url) if admission is not None else None
        if found is None or image_mode != "RGB":
            raise _unseen()
        options = {"image_mode": image_mode, "rgba_background_color": BACKGROUND}
        return MediaWithBytes(found.image, found.file, options if found.converted else None)

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise _unseen()

    async def _refused_async(self, *_: Any, **__: Any) -> Any:
        raise _unseen()

    load_from_url = fetch_image_embedding = fetch_audio_embedding = fetch_video_embedding = _refused
    load_from_url_async = fetch_image_embedding_async = _refused_async
    fetch_audio_embedding_async = fetch_video_embedding_async = _refused_async


def _unseen() -> Exception:
    return refusal(
        Unsupported("the request has an image, audio or video where none is served (docs/limits.md)")
    )
